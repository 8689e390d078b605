"""Drafts by an assistant: a smaller model with the same tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lmdecode.decoder.causal_caches import CHECKPOINT_INTERVAL, CausalCaches
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.drafts import DraftAsk
from lmdecode.decoder.engine.places import Places, common_length
from lmdecode.decoder.engine.prompts import PromptReader, add_parts
from lmdecode.decoder.engine.sequences import ReadSequence
from lmdecode.sampling.compact import CompactSampler
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["Assistant", "AssistantDrafts"]

_MOST_GROWTH = 4  # of a draft's length, by the heuristic
# 20 rows of a product take 2.4 times as long as 4 on two cores with VNNI, and 5 1.25 times as long
# as 1: see benchmarks/results/drafts.md.
_MOST_ROWS = 16


@dataclass(frozen=True)
class Assistant:
    """Settings of an assistant, a ``Drafting``.

    Attributes
    ----------
    model : PackedCausalModel
        The assistant.
    vocab_size : int
        Number of tokens of the model whose texts these are. The assistant may have more or fewer:
        vocabularies of one tokenizer are padded differently.
    cache_dtype : str
        Format of its keys and values.
    num_tokens : int
        Number of tokens of a draft.
    confidence_threshold : float
        A draft ends with a token of a lower probability; 0: with none.
    schedule : {"constant", "heuristic_transient"}
        "heuristic_transient": a text's drafts get 2 tokens longer, up to 4 times ``num_tokens``,
        when all were accepted, and else a token shorter.
    """

    model: PackedCausalModel
    vocab_size: int
    cache_dtype: str
    num_tokens: int
    confidence_threshold: float
    schedule: Literal["constant", "heuristic_transient"]

    @property
    def most(self) -> int:
        """See ``Drafting``."""
        return self.num_tokens * (1 if self.schedule == "constant" else _MOST_GROWTH)

    @property
    def most_rows(self) -> int:
        """See ``Drafting``."""
        return _MOST_ROWS

    def new_source(
        self, *, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> AssistantDrafts:
        """See ``Drafting``."""
        longest = self.model.max_positions
        if longest is not None:
            capacity = min(capacity, longest)
        return AssistantDrafts(self, rows, capacity, dialect, max_step_tokens)


class _Text:
    """A text of the assistant.

    Attributes
    ----------
    sequence : ReadSequence
        Its prompt.
    ends : collection of int
        Tokens that end it.
    size : int
        Number of tokens of its next draft.
    new : list of int
        The chosen tokens after the prompt.
    draft : list of int
        The last draft.
    read : int
        Number of tokens in the caches that follow the prompt: of ``new``, then of ``draft``.
    """

    def __init__(self, sequence: ReadSequence, ends: Collection[int], size: int) -> None:
        self.sequence, self.ends, self.size = sequence, ends, size
        self.new: list[int] = []
        self.draft: list[int] = []
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

    The assistant reads the prompts with caches of its own. A text has drafts once its prompt is
    read; prompts with a common prefix share it, as those of an ``Engine`` do. A text beyond the
    assistant's positions has none, and one with tokens that the assistant does not have has none
    from there on.

    Parameters
    ----------
    settings : Assistant
        Its settings.
    rows, capacity : int
        Number of texts, and maximum number of tokens that are read of each.
    dialect : str
        As of ``Sampler``.
    max_step_tokens : int
        Maximum number of prompt tokens that are read before the drafts of a step.
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
        self._reader: PromptReader[ReadSequence] = PromptReader(self._places, None)
        self._sampler = CompactSampler(rows, settings.vocab_size, dialect)
        self._texts: dict[int, _Text] = {}
        self._sampled: list[_Text] = []  # by their rows of the sampler
        threshold = settings.confidence_threshold
        self._threshold = math.log(threshold) if threshold else -math.inf

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """See ``DraftSource``."""
        if len(prompt) > self._capacity or max(prompt) >= self._settings.model.config.vocab_size:
            return
        sequence = ReadSequence(tuple(prompt))
        text = self._texts[row] = _Text(sequence, ends, self._settings.num_tokens)
        self._reader.begin(sequence)
        self._sampler.begin(torch.tensor(sequence.prompt_ids, device="cpu"), rules)
        self._sampled.append(text)

    def end(self, row: int) -> None:
        """See ``DraftSource``."""
        text = self._texts.pop(row, None)
        if text is None:
            return
        sequence = text.sequence
        if sequence in self._reader.sequences:
            self._reader.sequences.remove(sequence)
        at = self._sampled.index(text)
        self._sampler.end(at)
        self._sampled[at] = self._sampled[-1]
        self._sampled.pop()
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
        rows = [row for row, text in enumerate(self._sampled) if rooms.get(text, 0) > 0]
        while rows:
            rows = self._draft(rows, rooms)
        found = (self._texts.get(row) for row, _, _ in asks)
        return [[] if text is None else list(text.draft) for text in found]

    def _take(self, asks: Sequence[DraftAsk]) -> None:
        """Append the chosen tokens of texts, and go back to what they have in common."""
        vocab = self._settings.model.config.vocab_size
        places, lengths = [], []
        for row, new, _ in asks:
            text = self._texts.get(row)
            if text is None or not new:
                continue
            if any(not 0 <= token < vocab or token in text.ends for token in new):
                self.end(row)  # a text that has ended, or that the assistant cannot read
                continue
            right = common_length(text.draft, new)
            at = self._sampled.index(text)
            self._sampler.rewind(at, len(text.draft) - right)
            self._sampler.accept(at, new[right:])
            if text.draft and self._settings.schedule != "constant":
                is_right = right == len(text.draft)
                size = text.size + 2 if is_right else text.size - 1
                text.size = max(1, min(size, self._settings.most))
            kept = min(text.read, len(text.new) + right)
            if kept < text.read:
                text.read = kept
                places += text.sequence.places
                lengths.append(len(text.sequence.prompt_ids) + kept)
            text.new += new
            text.draft = []
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

    def _draft(self, rows: list[int], rooms: dict[_Text, int]) -> list[int]:
        """Append a token to the drafts of some rows of the sampler; return those that go on."""
        ids: list[int] = []
        entries = []
        for row in rows:
            tokens = self._sampled[row].unread()
            ids += tokens
            entries.append((self._sampled[row].sequence.places[0], len(tokens), 0, 1))
        logits = self._of_model(self._forward(ids, entries))
        going: list[int] = []
        begin = 0
        # Rows of the sampler that follow each other are a step of it.
        for _, group in itertools.groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
            run = [row for _, row in group]
            end = begin + len(run)
            going += self._choose(run, logits[begin:end], rooms)
            begin = end
        return going

    def _of_model(self, logits: Tensor) -> Tensor:
        """Return logits of the model's tokens: -inf where the assistant has none."""
        missing = self._settings.vocab_size - logits.shape[1]
        if not missing:
            return logits
        return functional.pad(logits, (0, missing), value=-math.inf).contiguous()

    def _choose(self, run: list[int], logits: Tensor, rooms: dict[_Text, int]) -> list[int]:
        has_threshold = self._threshold > -math.inf
        results = self._sampler.step(logits, None, 0 if has_threshold else -1, run[0])
        going = []
        for i, (row, token, status) in enumerate(
            zip(run, results.index.tolist(), results.status.tolist(), strict=True)
        ):
            text = self._sampled[row]
            if status:  # NaN: nothing more comes of this text
                rooms[text] = 0
                self._sampler.rewind(row, 1)
                continue
            text.draft.append(token)
            is_sure = results.logprob is None or float(results.logprob[i]) >= self._threshold
            if is_sure and token not in text.ends and len(text.draft) < rooms[text]:
                going.append(row)
        return going
