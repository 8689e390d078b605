"""What a terminal gets beside a command's output: how far long work is, and dimmed text."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Busy", "busy", "dimmed"]

_AFTER, _EVERY = 0.4, 0.2  # seconds
_CLEAR = "\r\x1b[2K"


class Busy:
    """A line of a terminal that says what is being done, and for how long, until ``end``.

    A callable text is asked each time the line is written.
    """

    def __init__(self, text: str | Callable[[], str]) -> None:
        self._text, self._begun = text, time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()

    def _draw(self) -> None:
        if self._ended.wait(_AFTER):
            return  # short work is not worth a line
        while not self._ended.is_set():
            text = self._text if isinstance(self._text, str) else self._text()
            seconds = time.monotonic() - self._begun
            sys.stderr.write(f"{_CLEAR}{text} ({seconds:.0f} s)")
            sys.stderr.flush()
            self._ended.wait(_EVERY)
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()

    def end(self) -> None:
        """Take the line away."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@contextmanager
def busy(text: str | Callable[[], str]) -> Iterator[None]:
    """Show a line while something is done."""
    line = Busy(text)
    try:
        yield
    finally:
        line.end()


def dimmed(text: str) -> str:
    """Return text as a terminal shows it dimmed."""
    return f"\x1b[2m{text}\x1b[0m"
