"""Places of an ``Engine``'s caches, and prompts with common prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lmdecode.decoder.causal_caches import BLOCK_SIZE, CausalCaches

__all__ = ["Places", "common_length"]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # equal up to low, and slices are compared in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Places:
    """The assignment of places to sequences, and the prompt tokens that each place holds.

    Only keys and values of tokens read as a prompt are shared: generated tokens have other bits. A
    freed place keeps its prompt until the place is needed. The place freed first is reused first.
    ``shared`` is called with the arguments of each sharing: the place, the other one, and the
    number of tokens.
    """

    def __init__(
        self, caches: CausalCaches, shared: Callable[[int, int, int], None] | None = None
    ) -> None:
        self._caches, self._shared = caches, shared
        self._prompts: dict[int, tuple[int, ...]] = {}  # prompts of places in use and of kept ones
        self._loaded: dict[int, int] = {}  # these places cannot go back to shorter lengths
        # An ordered set; the last of the empty ones is taken first.
        self._free = dict.fromkeys(range(caches.sequences - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self, prompt: tuple[int, ...], count: int = 1, like: int = -1) -> list[int]:
        """Take places; the first is for this prompt, the others hold nothing.

        Place ``like``, which holds the beginning of the prompt, is taken last, and is the first one
        then: with what it holds.
        """
        empty = [place for place in reversed(self._free) if place not in self._prompts]
        kept = [place for place in self._free if place in self._prompts and place != like]
        taken = [*empty, *kept][:count]
        if len(taken) < count:
            taken.insert(0, like)
        for place in taken:
            if place != like:
                self._forget(place)
            del self._free[place]
        self._prompts[taken[0]] = prompt
        return taken

    def give_back(self, place: int, *, keep: int = 0) -> None:
        """Free a place; it keeps at most the first ``keep`` tokens of its prompt."""
        if keep >= BLOCK_SIZE and place in self._prompts:
            try:
                self._caches.truncate([place], [keep])
            except ValueError:  # a layer's window has gone on
                self._forget(place)
            else:
                self._prompts[place] = self._prompts[place][:keep]
        else:
            self._forget(place)
        self._free[place] = None

    def cut(self, place: int, length: int) -> None:
        """Note that a place went back to a length: it may hold other tokens from there on."""
        if place in self._prompts:
            self._prompts[place] = self._prompts[place][:length]

    def note_loaded(self, place: int, length: int) -> None:
        """Note that layers with a window have no more of a place's first tokens than was stored."""
        self._loaded[place] = length

    def longest_common(self, prompt: tuple[int, ...], but: int = -1) -> tuple[int, int]:
        """Return the place, other than ``but``, with the longest common prefix, and its length.

        The last token of a prompt is always read, as its logits are needed. A prefix shorter than a
        block does not count: (-1, 0).
        """
        best, longest = -1, BLOCK_SIZE - 1
        for place, other in self._prompts.items():
            if place == but or other[: longest + 1] != prompt[: longest + 1]:
                continue
            common = min(common_length(other, prompt), len(prompt) - 1)
            if common <= int(self._caches.lengths[place]):  # else it is still being read
                common = self._caches.reachable(place, common)
            if common > longest and common >= self._loaded.get(place, 0):
                best, longest = place, common
        return (best, longest) if best >= 0 and longest >= BLOCK_SIZE else (-1, 0)

    def share(self, place: int, of: int, length: int) -> int:
        """Make a place begin with the first tokens of another, or go back to them if it is its own.

        Returns the number of tokens that it begins with: if layers keep states, up to the last
        state that is kept. 0: the place is empty.
        """
        least = self._loaded.get(of, 0)
        parents = torch.arange(self._caches.sequences, device="cpu")
        parents[place] = of
        self._caches.reorder(parents)
        length = self._caches.reachable(place, length)
        try:
            if length < max(least, 1):
                raise ValueError(f"{length} tokens; expected at least {least}")
            self._caches.truncate([place], [length])
        except ValueError:  # a layer's window has moved on, or was loaded without these tokens
            self._caches.truncate([place], [0])
            self._loaded.pop(place, None)
            return 0
        self._loaded[place] = least
        if self._shared is not None:
            self._shared(place, of, length)
        return length

    def _forget(self, place: int) -> None:
        self._loaded.pop(place, None)
        if self._prompts.pop(place, None) is not None or int(self._caches.lengths[place]):
            self._caches.truncate([place], [0])
