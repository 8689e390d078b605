"""Prompts of an ``Engine``: places of its caches, shared prefixes, the store, and parts."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from lmdecode.decoder.causal_caches import BLOCK_SIZE, KEPT_SEQUENCES, CausalCaches
from lmdecode.decoder.engine.request import ReadSequence
from lmdecode.decoder.prompt_states import PromptStates, lengths_to_store

__all__ = [
    "Part",
    "Places",
    "PromptReader",
    "PromptStore",
    "StoredPrompts",
    "add_parts",
    "common_length",
]


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
    freed place keeps its prompt until the place or its memory is needed. The place used last is
    reused last. ``shared`` is called with the arguments of each sharing: the place, the other one,
    and the number of tokens.

    With ``most_bytes`` of the caches, ``KEPT_SEQUENCES`` of the places are for prompts alone.
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
        return len(self._free) - (0 if self._caches.most_bytes is None else KEPT_SEQUENCES)

    @property
    def in_use(self) -> list[int]:
        """The places that are not free."""
        return [place for place in range(self._caches.sequences) if place not in self._free]

    def make_room(self, size: int) -> bool:
        """Forget prompts until so many bytes can be added; return whether they can be now."""
        most = self._caches.most_bytes
        if most is None:
            return True
        kept = [place for place in self._free if place in self._prompts]
        while (is_short := self._caches.used_bytes + size > most) and kept:
            self._forget(kept.pop(0))
        return not is_short

    def take(
        self, into: list[int], prompt: tuple[int, ...], count: int = 1, like: int = -1
    ) -> None:
        """Take places; the first is for this prompt, the others hold nothing.

        Place ``like``, which holds the beginning of the prompt, is taken last, and is the first one
        then: with what it holds. ``into`` has them before they are taken: an interrupted call
        leaves no place without an owner.
        """
        empty = [place for place in reversed(self._free) if place not in self._prompts]
        kept = [place for place in self._free if place in self._prompts and place != like]
        taken = [*empty, *kept][:count]
        if len(taken) < count:
            taken.insert(0, like)
        into += taken
        for place in taken:
            if place != like:
                self._forget(place)
            del self._free[place]
        self._prompts[taken[0]] = prompt

    def give_back(self, place: int, *, keep: int = 0) -> None:
        """Free a place; it keeps at most the first ``keep`` tokens of its prompt."""
        if keep >= BLOCK_SIZE and place in self._prompts:
            try:
                self._caches.truncate([place], [keep])
            except ValueError:  # a layer's window has gone on
                self._forget(place)
            else:
                self._keep(place, self._prompts[place][:keep])
        else:
            self._forget(place)
        self._free[place] = None

    def keep_copy(self, place: int) -> None:
        """Keep the prompt of a place that is in use and has read no more, if windows will leave it.

        Without a budget of bytes there is no place for it.
        """
        prompt = self._prompts.get(place, ())
        if len(prompt) < BLOCK_SIZE or self._caches.most_bytes is None or self._caches.is_plain:
            return
        empty = [free for free in self._free if free not in self._prompts]
        if prompt not in map(self._prompts.get, self._free) and (empty or self._free):
            to = empty[-1] if empty else next(iter(self._free))
            self._forget(to)
            if self.share(to, place, len(prompt)) == len(prompt):
                self._free[to] = self._free.pop(to)
                self._keep(to, prompt)

    def _keep(self, place: int, prompt: tuple[int, ...]) -> None:
        """Keep a prompt, in place of those that it begins with, if it can go back to them."""
        if self._caches.most_bytes is not None:
            for other in self._free:
                known = self._prompts.get(other)
                if known == prompt or (
                    known is not None and self._caches.is_plain and prompt[: len(known)] == known
                ):
                    self._forget(other)
        self._prompts[place] = prompt

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
        if of in self._free:
            self._free[of] = self._free.pop(of)
        if self._shared is not None:
            self._shared(place, of, length)
        return length

    def _forget(self, place: int) -> None:
        self._loaded.pop(place, None)
        if self._prompts.pop(place, None) is not None or int(self._caches.lengths[place]):
            self._caches.truncate([place], [0])
            if self._shared is not None:
                self._shared(place, place, 0)


# --- Stored prompts -------------------------------------------------------------------------------


Result = TypeVar("Result")
_MOST_PENDING = 8  # prompts that wait to be written; more are dropped if the disk is slower


class PromptStore:
    """Where the steps of a decoder-only model load prompts from, and write them to; here nowhere.

    ``has_windows``: layers with a window load only the last positions. ``make_room`` is that of the
    places, before so many bytes are loaded.
    """

    has_windows = False
    make_room: Callable[[int], bool]

    def load(self, place: int, prompt: tuple[int, ...], longer_than: int) -> int:
        """Load the stored prefix of a prompt into an empty place; return its number of tokens.

        0 if nothing is stored, or not more than another place has.
        """
        return 0

    def keep_at(self, prompt: tuple[int, ...], read: int) -> list[int]:
        """Return the lengths at which ``copy`` is called for a prompt that is read so far."""
        return []

    def copy(self, sequence: ReadSequence) -> None:
        """Copy the keys and values of a sequence's prompt, as far as it is read."""

    def put(self, sequence: ReadSequence) -> None:
        """Store the copy of a sequence, if there is one, as a token was chosen after it."""

    def put_all(self, but: Collection[ReadSequence] = ()) -> None:
        """Store the copies of all sequences except some."""

    def drop(self, sequence: ReadSequence) -> None:
        """Drop the copy of a sequence."""

    def flush(self, but: Collection[ReadSequence] = ()) -> None:
        """Wait until the copies of all sequences except some are written."""


@dataclass
class _Copy:
    """The part of a prompt that a sequence has read, and the prefixes to store."""

    states: PromptStates
    length: int = 0
    prefixes: list[tuple[array[int], Any]] = field(default_factory=list)


class StoredPrompts(PromptStore):
    """Prompts of an engine in a store. A failed load is a miss; a failed write is dropped.

    The store has the model's fingerprint, and must stay open while the engine runs. Layers with a
    window (``has_windows``) load only the last positions.
    """

    def __init__(self, store: Any, caches: CausalCaches) -> None:
        self._store, self._caches = store, caches
        self.has_windows = store.fingerprint.windows is not None
        self._pending: list[Future[int]] = []
        self._copies: dict[ReadSequence, _Copy] = {}  # not stored yet
        self._has_warned = False

    def keep_at(self, prompt: tuple[int, ...], read: int) -> list[int]:
        """Return the lengths at which to store a prompt that is read so far, none of a short one.

        Layers with a window or a state match only where a stored entry ends. The same prompt is
        looked up without its last token, as its logits are needed.
        """
        length = len(prompt) - self._store.fingerprint.has_checkpoints
        if length < BLOCK_SIZE or self._store.readonly:
            return []
        return lengths_to_store(self._store, read, length)

    def load(self, place: int, prompt: tuple[int, ...], longer_than: int) -> int:
        """See ``PromptStore``."""
        found = self._attempt(lambda: self._load(place, prompt, longer_than), 0)
        if found == 0:
            self._caches.truncate([place], [0])
        return found

    def _load(self, place: int, prompt: tuple[int, ...], longer_than: int) -> int:
        hit = self._store.lookup(array("i", prompt[:-1]))
        try:
            count = int(hit.num_tokens)
            if count < BLOCK_SIZE or count <= longer_than:
                return 0
            if not self.make_room(self._caches.bytes_for([count])):
                return 0
            states = PromptStates(self._store.fingerprint, count)
            if self._store.load(hit, out=states.reserve(count)) is None:
                return 0
            self._caches.write(place, count, states.first(count))
            return count
        finally:
            hit.release()

    def copy(self, sequence: ReadSequence) -> None:
        """See ``PromptStore``. A chosen token, for which ``put`` waits, shows: there is no NaN."""
        copy = self._copies.get(sequence)
        if copy is None:
            self._pending = [future for future in self._pending if not self._is_written(future)]
            if len(self._pending) + len(self._copies) >= _MOST_PENDING:
                return
            states = PromptStates(self._store.fingerprint, sequence.keep_at[-1])
            copy = self._copies[sequence] = _Copy(states)
        length = sequence.read
        copy.states.append(copy.length, self._caches.read(sequence.places[0], copy.length))
        copy.length = length
        tokens = array("i", sequence.prompt_ids[:length])
        copy.prefixes.append((tokens, copy.states.first(length)))

    def put(self, sequence: ReadSequence) -> None:
        """See ``PromptStore``."""
        copied = self._copies.pop(sequence, None)
        if copied is None:
            return
        future = self._attempt(lambda: self._store.put_each(copied.prefixes), None)
        if future is not None:
            self._pending.append(future)

    def put_all(self, but: Collection[ReadSequence] = ()) -> None:
        """See ``PromptStore``."""
        for sequence in [sequence for sequence in self._copies if sequence not in but]:
            self.put(sequence)

    def drop(self, sequence: ReadSequence) -> None:
        """See ``PromptStore``."""
        self._copies.pop(sequence, None)

    def flush(self, but: Collection[ReadSequence] = ()) -> None:
        """See ``PromptStore``."""
        self.put_all(but)
        for future in self._pending:
            self._attempt(future.result, 0)
        self._pending = []

    def _is_written(self, future: Future[int]) -> bool:
        if not future.done():
            return False
        self._attempt(future.result, 0)
        return True

    def _attempt(self, action: Callable[[], Result], default: Result) -> Result:
        try:
            return action()
        except (OSError, RuntimeError, ValueError) as error:  # StoreError is a RuntimeError
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"Engine goes on without the store: {error}", RuntimeWarning, stacklevel=2
                )
            return default


# --- Prompts that are read ------------------------------------------------------------------------


S = TypeVar("S", bound=ReadSequence)
Part = tuple[S, int]  # (sequence, number of tokens)


class PromptReader(Generic[S]):
    """Sequences with unread prompt tokens, in order of arrival.

    ``prompt_tokens`` counts the tokens that were computed, ``cached_tokens`` those that were shared
    or loaded from the store.
    """

    def __init__(self, places: Places, stored: PromptStore) -> None:
        self._places, self._stored = places, stored
        stored.make_room = places.make_room
        self.sequences: list[S] = []
        self.prompt_tokens = self.cached_tokens = 0

    def begin(self, sequence: S) -> None:
        """Assign places to a sequence; enough are free."""
        prompt = sequence.prompt_ids
        of, length = self._places.longest_common(prompt)
        self._places.take(sequence.places, prompt, sequence.num_beams, of)
        self.sequences.append(sequence)
        self._look_for_prefix(sequence, of, length)

    def parts(self, room: int) -> list[Part[S]]:
        """Return the parts of prompts that the next step reads, of at most ``room`` tokens."""
        self._follow()
        parts: list[Part[S]] = []
        for sequence in self.sequences:
            if room and sequence.follows is None:
                count = sequence.next_part(room)
                room -= count
                parts.append((sequence, count))
        return parts

    def advance(self, part: Part[S]) -> bool:
        """Record that a part has been read; return whether the prompt is read to its end."""
        sequence, count = part
        sequence.read += count
        self.prompt_tokens += count
        if sequence.read in sequence.keep_at:
            self._stored.copy(sequence)
        if sequence.unread:
            return False
        self.sequences.remove(sequence)
        return True

    def extend(self, sequence: S, begin: int, tokens: tuple[int, ...]) -> None:
        """Append tokens to the prompt of a sequence, which follow ``begin`` tokens that it has.

        Its prompt may have been read to its end, and other tokens after it.
        """
        if sequence not in self.sequences:
            sequence.prompt_ids, sequence.read = (0,) * begin, begin  # these are not read again
            self.sequences.append(sequence)
        sequence.prompt_ids += tokens

    def stop(self, sequence: S) -> None:
        """Read no more of the prompt of a sequence, which no longer has all that it has read."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)
        sequence.follows = None
        for other in self.sequences:
            if other.follows is not None and other.follows[0] is sequence:
                other.follows = None
                self._look_again(other)

    def _leader_at(self, place: int) -> S | None:
        return next((s for s in self.sequences if s.places[0] == place), None)

    def _look_for_prefix(self, sequence: S, of: int, length: int) -> None:
        """Share a prefix of a sequence's prompt with a place, or make it wait for one."""
        leader = self._leader_at(of)
        if leader is not None and leader is not sequence and leader.read < length:
            leader.stops.add(length)
            sequence.follows = leader, length
        else:
            self._begin_with(sequence, of, length)

    def _begin_with(self, sequence: S, of: int, length: int) -> None:
        """Begin a sequence with the prefix of its prompt from a place or the store."""
        place, prompt, stored = sequence.places[0], sequence.prompt_ids, self._stored
        if place != of:
            self._has_read(sequence, stored.load(place, prompt, length))
            if stored.has_windows:
                self._places.note_loaded(place, sequence.read)
        if length and not sequence.read:
            self._share(sequence, of, length)
        if not sequence.written:  # else it is there
            sequence.keep_at = stored.keep_at(prompt, sequence.read)
        sequence.stops.update(sequence.keep_at)

    def _share(self, sequence: S, of: int, length: int) -> None:
        if (shared := self._places.share(sequence.places[0], of, length)) > 0:
            self._has_read(sequence, shared)

    def _has_read(self, sequence: S, length: int) -> None:
        sequence.begin_with(length)
        self.cached_tokens += length

    def _follow(self) -> None:
        """Share newly read prefixes with the sequences that wait for them."""
        for sequence in self.sequences:
            if sequence.follows is None:
                continue
            leader, length = sequence.follows
            if not leader.places:  # it has left: another sequence may read the same
                sequence.follows = None
                self._look_again(sequence)
            elif leader.read >= length:
                sequence.follows = None
                self._share(sequence, leader.places[0], length)

    def _look_again(self, sequence: S) -> None:
        """Find another leader for a sequence after its leader left, or make it read by itself."""
        prompt, own = sequence.prompt_ids, sequence.places[0]
        of, length = self._places.longest_common(prompt, but=own)
        leader: ReadSequence | None = self._leader_at(of)
        while leader is not None and leader.follows is not None:
            leader = leader.follows[0]
            if leader is sequence:
                return  # they wait for this one
        self._look_for_prefix(sequence, of, length)


def add_parts(
    parts: Sequence[Part[S]], ids: list[int], entries: list[tuple[int, int, int, int]]
) -> None:
    """Append the tokens and entries of parts to those of a step of ``CausalCaches``."""
    for sequence, count in parts:
        ids += sequence.next_tokens(count)
        is_last = int(count == sequence.unread)
        entries.append((sequence.places[0], count, int(sequence.reads_prompt), is_last))
