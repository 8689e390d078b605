"""Drafts by an assistant: a smaller model with the same tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lmdecode.decoder.causal_caches import CHECKPOINT_INTERVAL, CausalCaches
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.draft_rows import (
    ChosenDrafts,
    DraftedText,
    DraftRows,
    drafts_of,
)
from lmdecode.decoder.engine.drafts import DraftAsk
from lmdecode.decoder.engine.places import Places
from lmdecode.decoder.engine.prompts import PromptReader, add_parts
from lmdecode.decoder.engine.sequences import ReadSequence
from lmdecode.decoder.engine.stored_prompts import PromptStore
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["Assistant", "AssistantDrafts"]


@dataclass(frozen=True)
class Assistant(ChosenDrafts):
    """Settings of an assistant, a ``Drafting``.

    ``vocab_size`` is the number of tokens of the model that is drafted for; the assistant may have
    more or fewer, since vocabularies of one tokenizer are padded differently. ``cache_dtype`` is
    the format of the assistant's caches.
    """

    model: PackedCausalModel
    vocab_size: int
    cache_dtype: str

    def new_source(
        self, *, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> AssistantDrafts:
        """See ``Drafting``."""
        longest = self.model.max_positions
        if longest is not None:
            capacity = min(capacity, longest)
        return AssistantDrafts(self, rows, capacity, dialect, max_step_tokens)


class _Text(DraftedText):
    """A text of the assistant: its prompt, and the chosen tokens after it.

    ``read`` is the number of tokens in the caches after the prompt: of ``new``, then of ``draft``.
    """

    def __init__(self, sequence: ReadSequence, ends: Collection[int], size: int) -> None:
        super().__init__(ends, size)
        self.sequence = sequence
        self.new: list[int] = []
        self.read = 0

    @property
    def is_read(self) -> bool:
        """Whether the prompt is read to its end."""
        return self.sequence.read == len(self.sequence.prompt_ids)

    def unread(self) -> list[int]:
        """Return the tokens that the caches do not have yet, and take them as read."""
        length = len(self.new)
        tokens = self.new[self.read :] + self.draft[max(0, self.read - length) :]
        self.read = length + len(self.draft)
        return tokens


class AssistantDrafts:
    """A ``DraftSource``: the tokens that an assistant chooses, with the noise of the texts.

    The assistant reads the prompts, at most ``max_step_tokens`` before the drafts of a step, with
    caches of its own: ``rows`` texts of ``capacity`` tokens. A text has drafts once its prompt is
    read; prompts with a common prefix share it, as in an ``Engine``. A text beyond the assistant's
    positions has none, and a text with tokens that the assistant lacks has none from there on.
    """

    def __init__(
        self, settings: Assistant, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> None:
        self._settings, self._capacity = settings, capacity
        self._max_step_tokens = max_step_tokens
        self._caches = CausalCaches(
            settings.model,
            rows,
            capacity,
            dtype=settings.cache_dtype,
            max_rows=max_step_tokens,
            rollback=settings.most,
            checkpoint_interval=CHECKPOINT_INTERVAL,
        )
        self._places = Places(self._caches)
        self._reader: PromptReader[ReadSequence] = PromptReader(self._places, PromptStore())
        self._rows: DraftRows[_Text] = DraftRows(settings, rows, settings.vocab_size, dialect)
        self._texts: dict[int, _Text] = {}

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """See ``DraftSource``."""
        if len(prompt) > self._capacity or max(prompt) >= self._settings.model.config.vocab_size:
            return
        sequence = ReadSequence(tuple(prompt))
        text = self._texts[row] = _Text(sequence, ends, self._settings.num_tokens)
        self._reader.begin(sequence)
        self._rows.begin(text, sequence.prompt_ids, rules)

    def end(self, row: int) -> None:
        """See ``DraftSource``."""
        text = self._texts.pop(row, None)
        if text is None:
            return
        sequence = text.sequence
        if sequence in self._reader.sequences:
            self._reader.sequences.remove(sequence)
        self._rows.end(text)
        (place,), sequence.places = sequence.places, []
        self._places.give_back(place, keep=sequence.read)

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See ``DraftSource``."""
        self._take(asks)
        if all(ask.room <= 0 for ask in asks):
            return [[] for _ in asks]
        self._read_prompts()
        rooms: dict[_Text, int] = {}
        for row, _, room in asks:
            text = self._texts.get(row)
            if text is not None and text.is_read:
                # The last token of a draft is not read.
                length = len(text.sequence.prompt_ids) + len(text.new)
                rooms[text] = min(room, text.size, self._capacity - length + 1)
        self._rows.draft(rooms, self._logits)
        return drafts_of(self._texts, asks)

    def _take(self, asks: Sequence[DraftAsk]) -> None:
        """Append the chosen tokens of texts; the caches go back to what these confirm."""
        own, places, lengths = self._settings.model.config.vocab_size, [], []
        for row, new, _ in asks:
            text = self._texts.get(row)
            if text is None or not new:
                continue
            if self._rows.has_ended(text, new) or max(new) >= own:
                self.end(row)  # a text that has ended, or that the assistant cannot read
                continue
            right = self._rows.take(text, new)
            kept = min(text.read, len(text.new) + right)
            if kept < text.read:
                text.read = kept
                places += text.sequence.places
                lengths.append(len(text.sequence.prompt_ids) + kept)
            text.new += new
        if places:
            self._caches.truncate(places, lengths)

    def _read_prompts(self) -> None:
        """Read parts of prompts, as much as a step allows."""
        parts = self._reader.parts(self._max_step_tokens)
        if not parts:
            return
        ids: list[int] = []
        entries: list[tuple[int, int, int, int]] = []
        add_parts(parts, ids, entries)
        self._forward(ids, entries)
        for part in parts:
            self._reader.advance(part)

    def _forward(self, ids: list[int], entries: list[tuple[int, int, int, int]]) -> Tensor:
        num_logits = sum(entry[3] for entry in entries)
        of_entries = torch.tensor(entries, dtype=torch.int64, device="cpu")
        return self._caches.forward(torch.tensor(ids, device="cpu"), of_entries, num_logits)

    def _logits(self, texts: list[_Text]) -> Tensor:
        """Read what the caches do not have yet of texts; return their logits."""
        ids: list[int] = []
        entries = []
        for text in texts:
            tokens = text.unread()
            ids += tokens
            entries.append((text.sequence.places[0], len(tokens), 0, 1))
        return self._of_model(self._forward(ids, entries))

    def _of_model(self, logits: Tensor) -> Tensor:
        """Return logits of the model's tokens: -inf where the assistant has none."""
        missing = self._settings.vocab_size - logits.shape[1]
        if not missing:
            return logits
        return functional.pad(logits, (0, missing), value=-math.inf).contiguous()
