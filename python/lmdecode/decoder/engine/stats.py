"""Counts of an ``Engine``."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["EngineStats"]


class EngineStats(NamedTuple):
    """Counts of an ``Engine``.

    Attributes
    ----------
    running, waiting, free_places : int
        Number of requests with places, of waiting requests, and of free places.
    steps, prompt_tokens, cached_tokens, new_tokens : int
        Since the engine was made: number of steps, of prompt tokens computed and shared, and of
        generated tokens.
    drafted_tokens, accepted_tokens : int
        Number of tokens of drafts, and of those that were chosen.
    """

    running: int
    waiting: int
    free_places: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
