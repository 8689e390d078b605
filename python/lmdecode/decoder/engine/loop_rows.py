"""Rows whose tokens a loop in Python chooses, on the steps of an ``Engine``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.causal_steps import CausalSteps
from lmdecode.decoder.engine.drafts import Drafting, Drafts, ReadAhead
from lmdecode.decoder.engine.encoder_decoder_steps import EncoderDecoderSteps
from lmdecode.decoder.engine.model_steps import ModelSteps, StepLogits
from lmdecode.decoder.engine.request import RequestState
from lmdecode.decoder.engine.rows import ReadRows, SearchedRows
from lmdecode.decoder.engine.sequences import DrawnSequence, WrittenSequence
from lmdecode.decoder.engine.stored_prompts import PromptStore
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["LoopRows", "LoopSequence", "MemoryRows", "causal_rows", "memory_rows"]

_MAX_STEP_TOKENS = 512  # of an assistant


class LoopSequence(DrawnSequence):
    """A sequence whose tokens Python chooses; no sampler has a row of it.

    ``rules`` choose its drafts. It reads its prompt for ``num_beams`` rows with the same prompt.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        end_tokens: tuple[int, ...] = (),
        rules: RowRules | None = None,
    ) -> None:
        nobody: Any = None  # waits for its tokens
        no_rules: Any = rules
        request = RequestState(tuple(prompt), nobody)
        super().__init__(request, max_new_tokens, end_tokens, no_rules, -1, None)
        self.num_rows = 1
        self.ahead = ReadAhead()
        # [1 + n, V], at the last token and at the n tokens ahead.
        self.logits = torch.empty(0, 0, dtype=torch.float32, device="cpu")

    @property
    def num_beams(self) -> int:
        """Rows that it needs at most."""
        return self.num_rows

    def takes(self, token: int) -> bool:
        """Append a chosen token; return whether its logits are known, as it was read ahead."""
        self.last = token
        self.request.tokens.append(token)
        is_known = self.ahead.takes(token)
        if is_known:
            self.logits = self.logits[1:]
        return is_known


class LoopRows(ReadRows):
    """``StepwiseModel`` of the rows of one call, on the steps of a model.

    Row ``leaders[row]`` reads a row's prompt, which is the same. With drafts each row reads its
    own. ``on_read`` is called with the tokens so far, [rows, S], before each later step. Rows where
    ``has_ended()``, [rows] bool or None for none, have logits of 0 from then on.
    """

    def __init__(
        self,
        steps: ModelSteps,
        rows: Sequence[LoopSequence],
        leaders: Sequence[int],
        *,
        has_drafts: bool = False,
        on_read: Callable[[Tensor], None] | None = None,
        has_ended: Callable[[], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.steps, self._rows, self._has_drafts = steps, list(rows), has_drafts
        self._leaders = list(range(len(rows))) if has_drafts else list(leaders)
        self._on_read, self._has_ended = on_read, has_ended
        self._no_searches = SearchedRows(steps.caches, 1)
        self._of_rows: Tensor | None = None  # places, unless row i has place i
        for leader, count in Counter(self._leaders).items():
            self._rows[leader].num_rows = count
            steps.begin(self._rows[leader])

    def read_prompts(self, input_ids: Tensor) -> Tensor:
        """See ``StepwiseModel``; the prompts are those of the sequences."""
        steps, rows = self.steps, self._rows
        logits, order = [], dict[WrittenSequence, int]()
        while steps.reading:
            step = steps.read(self, self._no_searches)
            assert step is not None
            for sequence in step.begun:
                order[sequence] = len(order)
            logits.append(step.logits)
        self._take_places()
        self.running = list(rows)
        at = [order[rows[leader]] for leader in self._leaders]
        found = logits[0] if len(logits) == 1 else torch.cat(logits)
        if at == list(range(len(found))):
            return found
        return found[torch.tensor(at, device="cpu")]

    def _take_places(self) -> None:
        """Give each row a place of its leader, which continues the leader's prompt."""
        rows, caches = self._rows, self.steps.caches
        left = {leader: iter(rows[leader].places) for leader in self._leaders}
        places = [next(left[leader]) for leader in self._leaders]
        parents = torch.arange(caches.sequences, device="cpu")
        sources = [rows[leader].places[0] for leader in self._leaders]
        if sources != places:
            parents[places] = torch.tensor(sources, device="cpu")
            caches.reorder(parents)
        for row, place in zip(rows, places, strict=True):
            row.places = [place]
        if places != list(range(caches.sequences)):
            self._of_rows = torch.tensor(places, device="cpu")

    def read(self, input_ids: Tensor) -> Tensor:
        """See ``StepwiseModel``. With drafts, the logits of some rows are known already."""
        if self._on_read is not None:
            self._on_read(input_ids)
        last = input_ids[:, -1].contiguous()
        if self._has_ended is not None and (ended := self._has_ended()) is not None:
            return self._read_others(last, ended)
        if not self._has_drafts:
            if self.tokens is None:  # the steps see the rows for the first time
                for row, token in zip(self._rows, last.tolist(), strict=True):
                    row.last = token
            self.tokens = last
            return self._step().logits
        chosen = zip(self._rows, last.tolist(), strict=True)
        running = [row for row, token in chosen if not row.takes(token)]
        if running:
            self.running = list(running)
            step = self._step()
            drafts = step.drafts or [[] for _ in running]
            parts = step.logits.split([1 + len(draft) for draft in drafts])
            for row, draft, part in zip(running, drafts, parts, strict=True):
                row.ahead.begin(draft)
                row.logits = part
        if len(self._rows) == 1:
            return self._rows[0].logits[:1]
        return torch.stack([row.logits[0] for row in self._rows])

    def _read_others(self, last: Tensor, ended: Tensor) -> Tensor:
        """Return the logits at last tokens of rows that have not ended; the others have 0."""
        rows, leaders = self._rows, torch.tensor(self._leaders, device="cpu")
        goes_on = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        goes_on[leaders[~ended]] = True
        reads = goes_on[leaders]  # with all rows of a place
        running = reads.nonzero()[:, 0].tolist()
        for leader in dict.fromkeys(self._leaders):
            if not reads[leader] and rows[leader].places:
                self.steps.leave(rows[leader], is_sound=False)
        for row in running:
            rows[row].last = int(last[row])
        self.tokens = last[reads] if len(running) == len(self.running) else None
        self.running = [rows[row] for row in running]
        logits: Tensor = self._step().logits
        found = logits.new_zeros(len(rows), logits.shape[1])
        found[reads] = logits
        return found.masked_fill_(ended[:, None], 0.0)

    def _step(self) -> StepLogits:
        step = self.steps.read(self, self._no_searches)
        assert step is not None
        list(step.begun)
        return step

    def reorder(self, parents: Tensor) -> None:
        """See ``StepwiseModel``."""
        caches, places = self.steps.caches, self._of_rows
        if places is not None:
            of_rows, parents = places[parents], torch.arange(caches.sequences, device="cpu")
            parents[places] = of_rows
        caches.reorder(parents)


class MemoryRows(LoopRows):
    """Rows of an encoder-decoder model, as many for each memory."""

    steps: EncoderDecoderSteps

    def read(self, input_ids: Tensor) -> Tensor:
        """See ``StepwiseModel``; an ended row may continue with padding outside the vocabulary."""
        return super().read(input_ids[:, -1:].clamp(0, self.steps.vocab_size - 1))

    def release(self) -> None:
        """Leave the memory to searches to come; the rows are used no more."""
        self.steps.searches.release()


def memory_rows(
    decoder: PackedDecoder,
    memory: Tensor,
    lengths: Tensor,
    prompts: list[list[int]],
    max_length: int,
    has_ended: Callable[[], Tensor | None] | None = None,
) -> MemoryRows:
    """Return the rows of ``prompts`` of tokens, as many for each memory.

    ``memory`` is [batch, S, M] float32 with ``lengths``, [batch] int64. ``has_ended``: see
    ``LoopRows``.
    """
    batch = len(memory)
    num_beams = len(prompts) // batch
    steps = EncoderDecoderSteps(
        decoder,
        max_requests=batch,
        num_beams=num_beams,
        capacity=max_length - 1,
        source=memory.shape[1],
        max_step_tokens=memory.shape[1],
    )
    sequences = [LoopSequence(prompt, max_length - len(prompt)) for prompt in prompts]
    leaders = [row - row % num_beams for row in range(len(prompts))]
    rows = MemoryRows(steps, sequences, leaders, has_ended=has_ended)
    steps.read_memories(sequences[::num_beams], memory, lengths)
    return rows


def causal_rows(
    packed: PackedCausalModel,
    cache_dtype: str,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    drafting: Drafting | None = None,
    rules: Sequence[RowRules] = (),
    end_tokens: Sequence[int] = (),
    stored: Callable[[CausalCaches], PromptStore] | None = None,
    on_read: Callable[[Tensor], None] | None = None,
) -> LoopRows:
    """Return the rows of prompts of a decoder-only model; equal prompts are read once.

    ``rules`` choose the drafts of each row, which ``end_tokens`` end. ``stored`` returns where the
    prompts are looked up. ``on_read``: see ``LoopRows``.
    """
    count, most = len(prompts), 0 if drafting is None else drafting.most
    capacity = max(map(len, prompts)) + max_new_tokens
    caches = CausalCaches(packed, count, capacity, dtype=cache_dtype, rollback=most)
    drafts = None
    if drafting is not None:
        drafts = Drafts(
            drafting,
            rows=count,
            capacity=capacity,
            dialect="transformers",
            max_step_tokens=max(count, _MAX_STEP_TOKENS),
        )
    first = dict[tuple[int, ...], int]()
    leaders = [first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)]
    rules_of_rows: Sequence[RowRules | None] = rules or [None] * count
    return LoopRows(
        CausalSteps(
            caches,
            sum(map(len, prompts)) + count * (1 + most),
            None if stored is None else stored(caches),
            drafts,
        ),
        [
            LoopSequence(prompt, max_new_tokens, tuple(end_tokens), of_row)
            for prompt, of_row in zip(prompts, rules_of_rows, strict=True)
        ],
        leaders,
        has_drafts=drafts is not None,
        on_read=on_read,
    )
