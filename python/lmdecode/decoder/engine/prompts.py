"""Prompts of an ``Engine``: read in parts, with common prefixes read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from lmdecode.decoder.engine.places import Places
from lmdecode.decoder.engine.sequences import ReadSequence
from lmdecode.decoder.engine.stored_prompts import PromptStore

__all__ = ["Part", "PromptReader", "add_parts"]

S = TypeVar("S", bound=ReadSequence)
Part = tuple[S, int]  # (sequence, number of tokens)


class PromptReader(Generic[S]):
    """Sequences with unread prompt tokens, in order of arrival.

    ``prompt_tokens`` counts the tokens that were computed, ``cached_tokens`` those that were shared
    or loaded from the store.
    """

    def __init__(self, places: Places, stored: PromptStore) -> None:
        self._places, self._stored = places, stored
        self.sequences: list[S] = []
        self.prompt_tokens = self.cached_tokens = 0

    def begin(self, sequence: S) -> None:
        """Assign places to a sequence; enough are free."""
        prompt = sequence.prompt_ids
        of, length = self._places.longest_common(prompt)
        sequence.places = self._places.take(prompt, sequence.num_beams, of)
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
        if sequence.read < len(sequence.prompt_ids):
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
        end = sequence.read + count
        ids += sequence.prompt_ids[sequence.read : end]
        entries.append((sequence.places[0], count, 1, int(end == len(sequence.prompt_ids))))
