"""Things that were costly to make, for the next one who needs the same."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

__all__ = ["Spares"]

Thing = TypeVar("Thing")


class Spares(Generic[Thing]):
    """What nobody uses now, under keys; the last ones that were given back.

    Who takes a thing has it alone until it is given back, so that threads do not share one.

    Parameters
    ----------
    most
        So many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._kept: list[tuple[Hashable, Thing]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: Hashable) -> Thing | None:
        """Return one with this key, which is then no longer kept; None: there is none."""
        with self._lock:
            for place, (known, _) in enumerate(self._kept):
                if known == key:
                    return self._kept.pop(place)[1]
        return None

    def give_back(self, key: Hashable, thing: Thing) -> None:
        """Keep one, and forget that which was given back longest ago where there are too many."""
        with self._lock:
            self._kept.append((key, thing))
            del self._kept[: -self._most]
