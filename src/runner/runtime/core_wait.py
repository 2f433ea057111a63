"""How long this process waited for a CPU core that other programs had."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter


def waited_for_core() -> float | None:
    """Seconds that the main thread was ready to run while others had the core; None where the system does not count them."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def core_wait(since: tuple[float, float | None]) -> float | None:
    """The share of the time since `(perf_counter(), waited_for_core())` in which other programs had the core; None if unknown."""
    (began, before), now = since, waited_for_core()
    if before is None or now is None:
        return None
    return round(min((now - before) / max(perf_counter() - began, 1e-9), 1.0), 3)
