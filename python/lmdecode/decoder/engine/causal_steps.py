"""The steps of an ``Engine`` for decoder-only models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.engine.drafts import DraftAsk, Drafts, HiddenRows
from lmdecode.decoder.engine.model_steps import StepLogits
from lmdecode.decoder.engine.places import Places
from lmdecode.decoder.engine.prompts import Part, PromptReader, add_parts
from lmdecode.decoder.engine.rows import Ended, ReadRows, SearchedRows
from lmdecode.decoder.engine.sequences import DrawnSequence, SearchedSequence, WrittenSequence
from lmdecode.decoder.engine.stored_prompts import PromptStore

__all__ = ["CausalSteps"]


class CausalSteps:
    """``ModelSteps`` of a decoder-only model: parts of prompts are read beside running sequences.

    A step has at most ``max_step_tokens``; with drafts, at most their ``most_rows`` of them
    belong to sampled sequences. Prompts are loaded from and written to ``stored``.
    """

    def __init__(
        self,
        caches: CausalCaches,
        max_step_tokens: int,
        stored: PromptStore | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self.caches, self._max_step_tokens = caches, max_step_tokens
        self.places = Places(caches, None if drafts is None else drafts.share)
        self._stored = stored or PromptStore()
        self.reader: PromptReader[WrittenSequence] = PromptReader(self.places, self._stored)
        self._drafts = drafts
        self._told: dict[DrawnSequence, int] = {}  # number of tokens that the drafts know of
        self._ahead: list[DrawnSequence] = []  # those that read drafts in the last step
        # The entries of the last step if it had sampled rows alone, and without drafts.
        self._entries: Tensor | None = None

    @property
    def prompt_tokens(self) -> int:
        """See ``ModelSteps``."""
        return self.reader.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """See ``ModelSteps``."""
        return self.reader.cached_tokens

    @property
    def nbytes(self) -> int:
        """See ``ModelSteps``."""
        return self.caches.nbytes

    @property
    def reading(self) -> list[WrittenSequence]:
        """See ``ModelSteps``."""
        return self.reader.sequences

    @property
    def num_free(self) -> int:
        """See ``ModelSteps``."""
        return self.places.num_free

    def has_room(self, sequence: WrittenSequence) -> bool:
        """See ``ModelSteps``."""
        return sequence.num_beams <= self.places.num_free

    def begin(self, sequence: WrittenSequence) -> None:
        """See ``ModelSteps``."""
        self.reader.begin(sequence)

    def encode(self) -> list[Ended]:
        """See ``ModelSteps``; nothing to do."""
        return []

    def read(self, drawn: ReadRows, searched: SearchedRows) -> StepLogits | None:
        """See ``ModelSteps``."""
        # A token follows each prompt that is read to its end.
        self._stored.put_all(but=self.reader.sequences)
        if self._entries is not None and drawn.tokens is not None and not self.reader.sequences:
            # The same rows again, and no prompts.
            logits = self.caches.forward(drawn.tokens, self._entries, len(drawn.running))
            return StepLogits(logits, iter(()))
        room = self._max_step_tokens - len(drawn.running) - len(searched.tokens)
        drafts = self._propose(drawn.running, room) if self._drafts is not None else []
        parts = self.reader.parts(room - sum(map(len, drafts)))
        ids, entries = _inputs(drawn, searched, parts, drafts)
        if not parts and not searched.running and self._drafts is None:
            self._entries = entries
        else:
            self._entries = None
        if not len(entries):
            return None
        ends = sum(sequence.read + count == len(sequence.prompt_ids) for sequence, count in parts)
        num_logits = len(drawn.running) + sum(map(len, drafts)) + len(searched.places) + ends
        hidden = None
        if self._drafts is not None:
            hidden = self._drafts.new_hidden(len(ids), self.caches.model.config.model_size)
        logits = self.caches.forward(ids, entries, num_logits, hidden_out=hidden)
        if self._drafts is not None and hidden is not None:
            self._drafts.observe(_hidden_rows(drawn, searched, parts, drafts, hidden))
        begun = (part[0] for part in parts if self.reader.advance(part))
        return StepLogits(logits, begun, drafts)

    def _propose(self, running: list[DrawnSequence], room: int) -> list[list[int]]:
        """Return the drafts of a step with room for some tokens; an empty list: there are none.

        Before, rejected tokens of the last drafts of these sequences are removed from the caches.
        """
        assert self._drafts is not None
        ahead = [s for s in self._ahead if s.places and s in running]
        waiting = [s for s in self._ahead if s.places and s not in running]
        if ahead:
            lengths = [len(s.prompt_ids) + len(s.request.tokens) - 1 for s in ahead]
            self.caches.truncate([s.places[0] for s in ahead], lengths)
        self._ahead = waiting
        if not running:
            return []
        if self.reader.sequences:
            room //= 2
        each = min(room, self._drafts.most_rows - len(running)) // len(running)
        asks = []
        for sequence in running:
            place, tokens = sequence.places[0], sequence.request.tokens
            if sequence not in self._told:
                self._told[sequence] = 0
                self._drafts.begin(place, sequence.prompt_ids, sequence.rules, sequence.end_tokens)
            # The last token of a text is not read.
            left = sequence.max_new_tokens - len(tokens) - 1
            asks.append(DraftAsk(place, tokens[self._told[sequence] :], min(left, each)))
            self._told[sequence] = len(tokens)
        drafts = self._drafts.propose(asks)
        self._ahead = waiting + [s for s, draft in zip(running, drafts, strict=True) if draft]
        return drafts if any(drafts) else []

    def leave(self, sequence: WrittenSequence, *, is_sound: bool) -> None:
        """See ``ModelSteps``. The prompt of a sound sequence is kept."""
        if is_sound:
            self._stored.put(sequence)
        else:
            self._stored.drop(sequence)
        if isinstance(sequence, DrawnSequence) and self._told.pop(sequence, None) is not None:
            assert self._drafts is not None
            self._drafts.end(sequence.places[0])
        first, *others = sequence.places
        self.places.give_back(first, keep=sequence.read if is_sound else 0)
        for place in others:
            self.places.give_back(place)
        sequence.places = []

    def clear(self) -> None:
        """See ``ModelSteps``."""
        self.reader.sequences, self._entries, self._ahead = [], None, []

    def flush(self) -> None:
        """See ``ModelSteps``."""
        self._stored.flush(but=self.reader.sequences)


def _hidden_rows(
    drawn: ReadRows,
    searched: SearchedRows,
    parts: list[Part[WrittenSequence]],
    drafts: list[list[int]],
    hidden: Tensor,
) -> list[HiddenRows]:
    """Return the hidden rows of sampled sequences and of prompts, in the order of ``_inputs``."""
    found, at = [], 0
    for i, sequence in enumerate(drawn.running):
        end = at + 1 + (len(drafts[i]) if drafts else 0)
        found.append(HiddenRows(sequence.places[0], -1, (), hidden[at:end]))
        at = end
    for kind in (DrawnSequence, SearchedSequence):
        for reader, count in parts:
            if isinstance(reader, kind):
                begin, end = reader.read, at + count
                tokens = reader.prompt_ids[begin : begin + count]
                found.append(HiddenRows(reader.places[0], begin, tokens, hidden[at:end]))
                at = end
        at += len(searched.places)
    return found


def _inputs(
    drawn: ReadRows,
    searched: SearchedRows,
    parts: list[Part[WrittenSequence]],
    drafts: list[list[int]],
) -> tuple[Tensor, Tensor]:
    """Return a step's tokens and entries; sampled sequences come first."""
    if not parts and not drawn.running:
        return searched.tokens, searched.entries
    if drafts:
        ids, entries = [], []
        for sequence, draft in zip(drawn.running, drafts, strict=True):
            ids += [sequence.last, *draft]
            entries.append((sequence.places[0], 1 + len(draft), 0, 1 + len(draft)))
    else:
        ids = [sequence.last for sequence in drawn.running]
        entries = [(sequence.places[0], 1, 0, 1) for sequence in drawn.running]
    add_parts([part for part in parts if isinstance(part[0], DrawnSequence)], ids, entries)
    ids += searched.tokens.tolist()
    entries += [(place, 1, 0, 1) for place in searched.places]
    add_parts([part for part in parts if isinstance(part[0], SearchedSequence)], ids, entries)
    kind: Any = {"dtype": torch.int64, "device": "cpu"}
    return torch.tensor(ids, **kind), torch.tensor(entries, **kind)
