"""Errors for rows in which a step could not choose a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

_MAX_IN_MESSAGE = 8
_OF_SAMPLING = {1: "NaN in its logits", 2: "no logit above -inf", 4: "an invalid parameter"}


def raise_for_status(
    status: list[int],
    step: int,
    *,
    noun: str = "row",
    text: Mapping[int, str] = _OF_SAMPLING,
) -> NoReturn:
    """Raise an error that names the rows with a status other than 0; there must be one.

    A status is a sum of keys of ``text``, the meanings of its bits. ``step`` is the number of
    generated tokens so far, and ``noun`` the word for a row.
    """
    failed = [
        f"{noun} {row} has " + " and ".join(words for bit, words in text.items() if bits & bit)
        for row, bits in enumerate(status)
        if bits
    ]
    if len(failed) > _MAX_IN_MESSAGE:
        failed[_MAX_IN_MESSAGE:] = [f"and {len(failed) - _MAX_IN_MESSAGE} more {noun}s"]
    raise RuntimeError(
        f"no token can be chosen at generation step {step}: after the logits processors "
        + "; ".join(failed)
    )
