"""Counts of an ``Engine``."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["EngineStats"]


class EngineStats(NamedTuple):
    """Counts of an ``Engine``.

    Attributes
    ----------
    running, waiting, free_places : int
        Requests that have places, those that wait for some, and places.
    steps, prompt_tokens, cached_tokens, new_tokens : int
        Since the engine was made: steps, tokens of prompts that were computed and that were shared,
        and tokens that were written.
    """

    running: int
    waiting: int
    free_places: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
