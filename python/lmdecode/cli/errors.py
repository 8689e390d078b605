"""Errors of commands: a line for the user, and an exit status."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable

__all__ = ["CommandError", "one_line", "told"]

# The library's prefix of an error, which is of no use to the user of a command.
_OF_LIBRARY = re.compile(r"^(TextModel|Tokenizer|Decoding|ChatTemplate)(\.\w+)?: ")
_INTERRUPTED = 130  # of a shell: 128 and the number of the signal


class CommandError(Exception):
    """Ends a command with its text, a line for the user."""


def one_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    text = _OF_LIBRARY.sub("", " ".join(str(error).split()))
    return text or type(error).__name__


def told(name: str, run: Callable[[], int]) -> int:
    """Run a command, and return its exit status; an error is a line, and a warning too."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        try:
            status = run()
            sys.stdout.flush()
            return status
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BrokenPipeError:  # whoever read has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (CommandError, ImportError, MemoryError, OSError, RuntimeError, TypeError,
                ValueError) as error:  # fmt: skip
            print(f"{name}: {one_line(error)}", file=sys.stderr)
            return 1
