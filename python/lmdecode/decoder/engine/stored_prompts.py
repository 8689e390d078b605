"""Prompts of an ``Engine`` in a store: looked up on arrival, written after they are read."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmdecode.decoder.causal_caches import BLOCK_SIZE, CausalCaches
from lmdecode.decoder.engine.sequences import ReadSequence
from lmdecode.decoder.prompt_states import PromptStates, lengths_to_store

__all__ = ["PromptStore", "StoredPrompts"]

T = TypeVar("T")
_MOST_PENDING = 8  # prompts that wait to be written; more are dropped if the disk is slower


class PromptStore:
    """Where the steps of a decoder-only model load prompts from, and write them to; here nowhere.

    ``has_windows``: layers with a window load only the last positions.
    """

    has_windows = False

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

    def _attempt(self, action: Callable[[], T], default: T) -> T:
        try:
            return action()
        except (OSError, RuntimeError, ValueError) as error:  # StoreError is a RuntimeError
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"Engine goes on without the store: {error}", RuntimeWarning, stacklevel=2
                )
            return default
