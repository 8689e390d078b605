"""A pool of objects that are costly to make, for reuse by key."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

__all__ = ["Spares"]

Thing = TypeVar("Thing")


class Spares(Generic[Thing]):
    """Pool of unused objects by key; it keeps the last ``most`` that were returned to it.

    A taken object leaves the pool until it is given back, so threads never share one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._kept: list[tuple[Hashable, Thing]] = []

    def __reduce__(self) -> tuple[type[Spares[Thing]], tuple[int]]:
        return Spares, (self._most,)  # a copy is empty

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: Hashable) -> Thing | None:
        """Remove an object with this key from the pool and return it; None if there is none."""
        with self._lock:
            for place, (known, _) in enumerate(self._kept):
                if known == key:
                    return self._kept.pop(place)[1]
        return None

    def give_back(self, key: Hashable, thing: Thing) -> None:
        """Keep an object; if there are too many, drop the one that was given back first."""
        with self._lock:
            self._kept.append((key, thing))
            del self._kept[: -self._most]
