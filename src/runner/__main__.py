"""The program: `python -m runner`, or `runner`."""

import gc
import io
import os
import sys
import time

import runner


class _Display(io.FileIO):
    """Standard output or error: what cannot be shown is lost, and does not end a run."""

    lost: OSError | None = None  # why something was

    def write(self, content: bytes, /) -> int:  # type: ignore[override]
        """Write what can be written, and say that all of it was."""
        try:
            return super().write(content) or len(content)
        except OSError as error:
            self.lost = self.lost or error
            return len(content)


def _displays() -> list[_Display]:
    """Replace standard output and error by displays, and open those of the standard streams that are closed."""
    displays = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the next file would take its number, and get what is meant for the stream
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if name != "stdin":
            old = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115
            display = _Display(number, "w", closefd=False)
            stream = io.TextIOWrapper(
                io.BufferedWriter(display),  # type: ignore[type-var]
                encoding=old.encoding,
                errors=old.errors,
                line_buffering=old.line_buffering,
                write_through=old.write_through,
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
            displays.append(display)
    return displays


def main() -> int:
    """Run one command; Ctrl-C while its modules are imported ends it with a word, too."""
    runner.began, (output, _) = time.time(), _displays()
    try:
        from runner import cli

        status = cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    finally:
        if "torch" not in sys.modules:
            gc.freeze()  # a collection at exit would delay the report of a mistake
    sys.stdout.flush()
    if not status and output.lost and not isinstance(output.lost, BrokenPipeError) and sys.argv[1:2] != ["train"]:
        print(f"error: standard output cannot be written: {output.lost.strerror}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
