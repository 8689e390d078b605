"""Calls that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# Of each, by name: a pattern of the message, the error, the call.
WrongCalls = dict[str, tuple[str, type[Exception], Callable[[], Any]]]


def assert_refused(message: str, error: type[Exception], call: Callable[[], Any]) -> None:
    """Make a call of ``WrongCalls``: its message has the pattern somewhere."""
    with pytest.raises(error, match=message):
        call()
