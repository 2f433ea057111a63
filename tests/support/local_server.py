"""A server of HTTP in this process, which can be stopped and started again on the same port."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer:
    """Listens on a port of this machine from `listen` to `stop`."""

    port = 0
    _server: ThreadingHTTPServer | None = None

    def listen(self, handler: type[BaseHTTPRequestHandler]) -> None:
        """Answer requests, on the same port as before."""
        handler.log_message = lambda *_: None  # type: ignore[assignment]
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
