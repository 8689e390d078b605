"""Drafts that a model chooses, an assistant or a layer of its own, with the noise of texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from lmdecode._checks import check_choice, check_count, check_int, check_number, type_error
from lmdecode.decoder.causal_caches import CHECKPOINT_INTERVAL, CausalCaches
from lmdecode.decoder.engine.drafts import DraftAsk, Drafting, HiddenRows, PromptLookup
from lmdecode.decoder.engine.prompts import (
    Places,
    PromptReader,
    PromptStore,
    add_parts,
    common_length,
)
from lmdecode.decoder.engine.request import ReadSequence
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.sampling.sampler import CompactSampler
from lmdecode.sampling.sampler_rows import RowRules

__all__ = [
    "Assistant",
    "AssistantDrafts",
    "ChosenDrafts",
    "DraftRows",
    "DraftedText",
    "Mtp",
    "MtpDrafts",
    "drafting_of",
    "drafts_of",
    "is_padding",
]

_MOST_GROWTH = 4  # of a draft's length, by the heuristic
# 20 rows of a product take 2.4 times as long as 4 on two cores with VNNI, and 5 1.25 times as long
# as 1: see benchmarks/results/drafts.md.
_MOST_ROWS = 16


@dataclass(frozen=True)
class ChosenDrafts:
    """Settings of a ``Drafting`` that chooses its tokens one by one.

    A draft has ``num_tokens``, and ends early with a token of a lower probability than
    ``confidence_threshold``. With the schedule "heuristic_transient" a text's drafts get 2 tokens
    longer, up to 4 times ``num_tokens``, when all were accepted, and else a token shorter; with
    "constant" they do not change.
    """

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


class DraftedText:
    """A text with drafts: the tokens that end it, the next draft's size, the last draft."""

    def __init__(self, ends: Collection[int], size: int) -> None:
        self.ends, self.size = ends, size
        self.draft: list[int] = []


def drafts_of(texts: Mapping[int, DraftedText], asks: Sequence[DraftAsk]) -> list[list[int]]:
    """Return copies of the drafts of the rows that were asked for, empty ones of other rows."""
    found = (texts.get(ask.row) for ask in asks)
    return [[] if text is None else list(text.draft) for text in found]


T = TypeVar("T", bound=DraftedText)


class DraftRows(Generic[T]):
    """Up to ``rows`` texts with drafts, a row of a sampler with ``dialect`` each."""

    def __init__(self, settings: ChosenDrafts, rows: int, vocab: int, dialect: str) -> None:
        self._settings, self._vocab = settings, vocab
        self._sampler = CompactSampler(rows, vocab, dialect)
        self._texts: list[T] = []  # by their rows of the sampler
        threshold = settings.confidence_threshold
        self._threshold = math.log(threshold) if threshold else -math.inf

    @property
    def is_empty(self) -> bool:
        """Whether there is no text."""
        return not self._texts and self._sampler.count == 0

    def begin(self, text: T, prompt: Sequence[int], rules: RowRules) -> None:
        """Add a text."""
        self._sampler.begin(torch.tensor(prompt, device="cpu"), rules)
        self._texts.append(text)

    def end(self, text: T) -> None:
        """Remove a text."""
        at = self._texts.index(text)
        self._sampler.end(at)
        self._texts[at] = self._texts[-1]
        self._texts.pop()

    def has_ended(self, text: T, new: Sequence[int]) -> bool:
        """Whether tokens end a text."""
        return any(not 0 <= token < self._vocab or token in text.ends for token in new)

    def take(self, text: T, new: Sequence[int]) -> int:
        """Append the chosen tokens of a text; return how many of its draft are the first ones."""
        right = common_length(text.draft, new)
        at = self._texts.index(text)
        if right < len(text.draft):
            self._sampler.rewind(at, len(text.draft) - right)
        self._sampler.accept(at, new[right:])
        if text.draft and self._settings.schedule != "constant":
            is_right = right == len(text.draft)
            size = text.size + 2 if is_right else text.size - 1
            text.size = max(1, min(size, self._settings.most))
        text.draft = []
        return right

    def draft(self, rooms: dict[T, int], logits_of: Callable[[list[T]], Tensor]) -> None:
        """Draft tokens of texts, at most as many as their ``rooms``.

        ``logits_of`` returns the logits, [n, V], after the drafts of n texts.
        """
        rows = [row for row, text in enumerate(self._texts) if rooms.get(text, 0) > 0]
        while rows:
            logits = logits_of([self._texts[row] for row in rows])
            going: list[int] = []
            begin = 0
            # Rows of the sampler that follow each other are a step of it.
            for _, group in itertools.groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
                run = [row for _, row in group]
                end = begin + len(run)
                going += self._choose(run, logits[begin:end], rooms)
                begin = end
            rows = going

    def _choose(self, run: list[int], logits: Tensor, rooms: dict[T, int]) -> list[int]:
        """Append a token to the drafts of some rows; return those that go on."""
        has_threshold = self._threshold > -math.inf
        results = self._sampler.step(logits, None, 0 if has_threshold else -1, run[0])
        going = []
        for i, (row, token, status) in enumerate(
            zip(run, results.index.tolist(), results.status.tolist(), strict=True)
        ):
            text = self._texts[row]
            if status:  # NaN: nothing more comes of this text
                rooms[text] = 0
                self._sampler.rewind(row, 1)
                continue
            text.draft.append(token)
            is_sure = results.logprob is None or float(results.logprob[i]) >= self._threshold
            if is_sure and token not in text.ends and len(text.draft) < rooms[text]:
                going.append(row)
        return going


# --- Drafts of an assistant -----------------------------------------------------------------------


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
        self, *, texts: int, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> AssistantDrafts:
        """See ``Drafting``. Kept prompts take no memory of the assistant."""
        longest = self.model.max_positions
        if longest is not None:
            capacity = min(capacity, longest)
        return AssistantDrafts(self, texts, capacity, dialect, max_step_tokens)


class _AssistantText(DraftedText):
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
    caches of its own: ``texts`` of ``capacity`` tokens. A text has drafts once its prompt is
    read; prompts with a common prefix share it, as in an ``Engine``. A text beyond the assistant's
    positions has none, and a text with tokens that the assistant lacks has none from there on.
    """

    def __init__(
        self, settings: Assistant, texts: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> None:
        self._settings, self._capacity = settings, capacity
        self._max_step_tokens = max_step_tokens
        self._caches = CausalCaches(
            settings.model,
            texts,
            capacity,
            dtype=settings.cache_dtype,
            max_rows=max_step_tokens,
            rollback=settings.most,
            checkpoint_interval=CHECKPOINT_INTERVAL,
        )
        self._places = Places(self._caches)
        self._reader: PromptReader[ReadSequence] = PromptReader(self._places, PromptStore())
        self._rows: DraftRows[_AssistantText] = DraftRows(
            settings, texts, settings.vocab_size, dialect
        )
        self._texts: dict[int, _AssistantText] = {}

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """See ``DraftSource``."""
        if len(prompt) > self._capacity or max(prompt) >= self._settings.model.config.vocab_size:
            return
        sequence = ReadSequence(tuple(prompt))
        text = self._texts[row] = _AssistantText(sequence, ends, self._settings.num_tokens)
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
        rooms: dict[_AssistantText, int] = {}
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

    def _logits(self, texts: list[_AssistantText]) -> Tensor:
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


# --- Drafts by multi-token prediction -------------------------------------------------------------


@dataclass(frozen=True)
class Mtp(ChosenDrafts):
    """Settings of drafts by multi-token prediction, a ``Drafting``.

    ``model`` is the ``mtp`` of the model that is drafted for.
    """

    model: PackedCausalModel

    def new_source(
        self, *, texts: int, rows: int, capacity: int, dialect: str, max_step_tokens: int
    ) -> MtpDrafts:
        """See ``Drafting``."""
        return MtpDrafts(self, texts, rows, capacity, dialect, max_step_tokens)


class _Row:
    """The pairs that the layer has read of a row: a token, and the hidden row of the token before.

    ``read`` is the number of pairs in its caches, without those of a draft; ``position`` the known
    number of prompt tokens that the model has read. ``gap`` is how many of these have no pair, as
    they were read elsewhere. ``hidden``, [n, D], are the hidden rows of the last tokens, while
    their next tokens are not known yet.
    """

    def __init__(self) -> None:
        self.read = self.position = self.gap = 0
        self.hidden = torch.empty(0, 0, device="cpu", dtype=torch.float32)


class _MtpText(DraftedText):
    """A text: ``row`` is its row, and ``own`` the last hidden row of its draft, [1, D]."""

    def __init__(self, row: int, ends: Collection[int], size: int) -> None:
        super().__init__(ends, size)
        self.row = row
        self.own = torch.empty(0, 0, device="cpu", dtype=torch.float32)


class MtpDrafts:
    """A ``HiddenSource``: tokens that a layer predicts from the model's hidden rows.

    For accepted tokens it reads the model's hidden rows, for tokens of a draft its own. A text has
    at most ``capacity`` tokens; the model reads at most ``max_step_tokens`` in a step.
    """

    def __init__(
        self,
        settings: Mtp,
        texts: int,
        rows: int,
        capacity: int,
        dialect: str,
        max_step_tokens: int,
    ) -> None:
        self._settings, config = settings, settings.model.config
        self._caches = CausalCaches(settings.model, rows, capacity, max_rows=max_step_tokens)
        self._size = config.model_size
        self._rows = [_Row() for _ in range(rows)]
        self._sampled: DraftRows[_MtpText] = DraftRows(settings, texts, config.vocab_size, dialect)
        self._texts: dict[int, _MtpText] = {}

    def begin(
        self, row: int, prompt: Sequence[int], rules: RowRules, ends: Collection[int]
    ) -> None:
        """See ``DraftSource``."""
        text = self._texts[row] = _MtpText(row, ends, self._settings.num_tokens)
        self._sampled.begin(text, prompt, rules)

    def end(self, row: int) -> None:
        """See ``DraftSource``. What was read of the prompt stays, for ``share``."""
        if (text := self._texts.pop(row, None)) is not None:
            self._sampled.end(text)

    def share(self, row: int, of: int, length: int) -> None:
        """See ``HiddenSource``."""
        to, source = self._rows[row], self._rows[of]
        if row != of:
            parents = torch.arange(len(self._rows), device="cpu")
            parents[row] = of
            self._caches.reorder(parents)
        to.read = max(0, min(source.read, length - 1 - source.gap))
        self._caches.truncate([row], [to.read])
        to.position, to.gap, to.hidden = length, source.gap, self._nothing()

    def observe(self, steps: Sequence[HiddenRows]) -> None:
        """See ``HiddenSource``."""
        pairs: list[tuple[int, list[int], list[Tensor]]] = []
        for row, begin, tokens, hidden in steps:
            found = self._rows[row]
            if begin < 0:
                found.hidden = hidden
                continue
            is_known = begin == found.position and found.read == int(self._caches.lengths[row])
            if begin == 0 or not is_known:
                found.read, found.hidden = 0, self._nothing()
                self._caches.truncate([row], [0])
            # The first token has a pair only if the hidden row before it is known.
            before = found.hidden[-1:]
            pairs.append((row, list(tokens[1 - len(before) :]), [before, hidden[:-1]]))
            found.position, found.hidden = begin + len(tokens), hidden[-1:].clone()
        self._read([pair for pair in pairs if pair[1]], is_prompt=True)
        for row, *_ in pairs:
            self._rows[row].gap = self._rows[row].position - 1 - self._rows[row].read

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See ``DraftSource``."""
        pairs: list[tuple[int, list[int], list[Tensor]]] = []
        rooms: dict[_MtpText, int] = {}
        for row, new, room in asks:
            text, found = self._texts.get(row), self._rows[row]
            if text is None or not new:
                continue
            if self._sampled.has_ended(text, new):
                self.end(row)
                continue
            self._sampled.take(text, new)
            if len(new) <= len(found.hidden):
                pairs.append((row, new, [found.hidden[: len(new)]]))
                rooms[text] = min(room, text.size)
            found.hidden = self._nothing()
        if pairs:
            self._caches.truncate(
                [row for row, *_ in pairs], [self._rows[row].read for row, *_ in pairs]
            )
            wanted = {text.row for text in rooms if rooms[text] > 0}
            first = self._read(pairs, is_prompt=False, wanted=wanted)
            self._sampled.draft(rooms, lambda texts: self._logits(texts, first))
        return drafts_of(self._texts, asks)

    def _nothing(self) -> Tensor:
        return torch.empty(0, self._size, device="cpu", dtype=torch.float32)

    def _read(
        self,
        pairs: Sequence[tuple[int, list[int], list[Tensor]]],
        *,
        is_prompt: bool,
        wanted: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """Read pairs of rows; return the logits, [V], after the last ones of the wanted rows."""
        if not pairs:
            return {}
        ids = [token for _, tokens, _ in pairs for token in tokens]
        entries = [
            (row, len(tokens), int(is_prompt), int(row in wanted)) for row, tokens, _ in pairs
        ]
        hidden = torch.cat([part for *_, parts in pairs for part in parts])
        logits, out = self._forward(ids, entries, hidden)
        at, found = -1, iter(logits)
        for row, tokens, _ in pairs:
            self._rows[row].read += len(tokens)
            at += len(tokens)
            if row in self._texts:
                self._texts[row].own = out[at : at + 1]
        return {row: next(found) for row, *_ in pairs if row in wanted}

    def _forward(
        self, ids: list[int], entries: list[tuple[int, int, int, int]], hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(hidden)
        logits = self._caches.forward(
            torch.tensor(ids, device="cpu"),
            torch.tensor(entries, dtype=torch.int64, device="cpu"),
            sum(entry[3] for entry in entries),
            hidden_in=hidden,
            hidden_out=out,
        )
        return logits, out

    def _logits(self, texts: list[_MtpText], first: dict[int, Tensor]) -> Tensor:
        """Return the logits after the drafts of texts; ``first``: of texts without a draft."""
        if not texts[0].draft:  # so have all others, which go on together
            return torch.stack([first[text.row] for text in texts])
        hidden = torch.cat([text.own for text in texts])
        entries = [(text.row, 1, 0, 1) for text in texts]
        logits, out = self._forward([text.draft[-1] for text in texts], entries, hidden)
        for i, text in enumerate(texts):
            text.own = out[i : i + 1]
        return logits


# --- Options, as ``generate()`` names them --------------------------------------------------------


_NUM_TOKENS = 5
_NUM_MTP_TOKENS = 3  # a layer that has learned to predict one more is less sure of further ones
_MTP = "mtp"
_CONFIDENCE_THRESHOLD = 0.4
_SCHEDULES = ("constant", "heuristic_transient")
_MOST = 1 << 10  # tokens of an assistant's draft
_MATCHING_NGRAM = 2  # the default of transformers
_PADDING = 0.01  # of a vocabulary: of Qwen 2.5's 0.1 %, of Gemma 3's 0.03 %, of Pythia's 0.8 %


def is_padding(size: int, other: int) -> bool:
    """Tell whether two sizes of a vocabulary may differ by its padding alone."""
    return abs(size - other) <= _PADDING * max(size, other)


def _assistant_of(
    op: str, model: PackedCausalModel, assistant_model: Any, has_same_tokens: bool
) -> PackedCausalModel:
    """Return the model that drafts."""
    if isinstance(assistant_model, str) and assistant_model == _MTP:
        if model.mtp is None:
            raise ValueError(
                f"{op}: assistant_model is 'mtp' for a model without these weights; expected one "
                "that Decoding.from_pretrained loaded with mtp=True"
            )
        return model.mtp
    assistant = getattr(assistant_model, "decoder", None)
    if not isinstance(assistant, PackedCausalModel):
        expected = "a lmdecode.Decoding of a decoder-only model, or 'mtp'"
        raise type_error(op, "assistant_model", assistant_model, expected)
    vocab, own = model.config.vocab_size, assistant.config.vocab_size
    if not has_same_tokens and not is_padding(own, vocab):
        raise ValueError(
            f"{op}: assistant_model has a vocabulary of {own} tokens; expected {vocab}, that of "
            f"the model, or so with padding, at most {_PADDING:.0%} more or fewer"
        )
    return assistant


def drafting_of(
    op: str,
    model: Any,
    *,
    assistant_model: Any = None,
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    num_assistant_tokens_schedule: str | None = None,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    has_same_tokens: bool = False,
) -> Drafting | None:
    """Return the settings of drafts, None if there are none; ``op`` is for errors.

    ``model`` is the packed model that reads the drafts. ``has_same_tokens``: the model and the
    assistant are known to have one tokenizer, so their vocabularies may be of any sizes. For the
    others see ``Decoding.engine``. Raises ValueError or TypeError that names the argument.
    """
    if assistant_model is None and prompt_lookup_num_tokens is None:
        return None
    if not isinstance(model, PackedCausalModel):
        name = "prompt_lookup_num_tokens" if assistant_model is None else "assistant_model"
        raise ValueError(f"{op}: {name} is given; expected None for an encoder-decoder model")
    if assistant_model is None:
        size = _MATCHING_NGRAM if max_matching_ngram_size is None else max_matching_ngram_size
        return PromptLookup(
            check_count(op, "prompt_lookup_num_tokens", prompt_lookup_num_tokens),
            check_count(op, "max_matching_ngram_size", size),
        )
    if prompt_lookup_num_tokens is not None:
        raise ValueError(
            f"{op}: prompt_lookup_num_tokens is {prompt_lookup_num_tokens}; expected None with an "
            "assistant_model"
        )
    assistant = _assistant_of(op, model, assistant_model, has_same_tokens)
    count, threshold = num_assistant_tokens, assistant_confidence_threshold
    if count is None:
        count = _NUM_MTP_TOKENS if assistant is model.mtp else _NUM_TOKENS
    threshold = _CONFIDENCE_THRESHOLD if threshold is None else threshold
    limits = f"1 to {_MOST}"
    count = check_int(op, "num_assistant_tokens", count, 1, _MOST, limits=limits)
    threshold = check_number(op, "assistant_confidence_threshold", threshold)
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"{op}: assistant_confidence_threshold is {threshold}; expected 0 to 1")
    schedule: Any = num_assistant_tokens_schedule or _SCHEDULES[0]
    check_choice(op, "num_assistant_tokens_schedule", schedule, _SCHEDULES)
    if assistant is model.mtp:
        return Mtp(count, threshold, schedule, assistant)
    vocab, cache_dtype = model.config.vocab_size, assistant_model.cache_dtype
    return Assistant(count, threshold, schedule, assistant, vocab, cache_dtype)
