"""A decoder-only model in C++, step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.drafts import Drafting, Drafts, HiddenRows
from lmdecode.integrations.transformers.decoding.lookahead import Lookahead
from lmdecode.sampling.sampler_rows import RowRules

__all__ = ["CausalModel", "LoopDrafts"]

_MAX_STEP_TOKENS = 512  # of an assistant


class LoopDrafts(NamedTuple):
    """The drafts of a loop: their settings, the rules of each row, and the tokens that end a row.

    The rules choose tokens as the row does, as far as a sampler can express it.
    """

    drafting: Drafting
    rules: list[RowRules]
    ends: list[int]


class CausalModel:
    """A packed decoder-only model as ``StepwiseModel``; equal prompts are read once.

    Prompts are [rows, S] int64, padded on the left where ``attention_mask`` is 0; ``max_length``
    counts the padding. With ``drafts``, steps read draft tokens ahead; only for loops that do not
    reorder rows.
    """

    def __init__(
        self,
        packed: PackedCausalModel,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_length: int,
        cache_dtype: str,
        drafts: LoopDrafts | None = None,
    ) -> None:
        rows = input_ids.shape[0]
        if attention_mask is None:
            self._prompts = list(input_ids)
        else:
            mask = attention_mask.to(input_ids.device) != 0
            self._prompts = [row[seen] for row, seen in zip(input_ids, mask, strict=True)]
        longest = max(map(len, self._prompts))
        self.caches = CausalCaches(
            packed,
            rows,
            longest + max(1, max_length - input_ids.shape[1]),
            dtype=cache_dtype,
            rollback=0 if drafts is None else drafts.drafting.most,
        )
        self._hidden: list[Tensor] = []  # of the prompts read so far, as drafts see them
        self._entries = torch.tensor([[row, 1, 0, 1] for row in range(rows)], device="cpu")
        self._lookahead: Lookahead | None = None
        self._drafts: Drafts | None = None
        if drafts is not None:
            self._lookahead = self._lookahead_of(drafts)

    def _lookahead_of(self, drafts: LoopDrafts) -> Lookahead:
        prompts, caches = [prompt.tolist() for prompt in self._prompts], self.caches
        source = drafts.drafting.new_source(
            rows=len(prompts),
            capacity=caches.max_length,
            dialect="transformers",
            max_step_tokens=max(len(prompts), _MAX_STEP_TOKENS),
        )
        begun = Drafts(source)
        for row, (prompt, rules) in enumerate(zip(prompts, drafts.rules, strict=True)):
            begun.begin(row, prompt, rules, drafts.ends)
        self._drafts = begun
        return Lookahead(caches, [len(prompt) for prompt in prompts], begun)

    def read_prompts(self, input_ids: Tensor) -> Tensor:
        prompts, leaders, parents = self._prompts, list[int](), list[int]()
        places = dict[tuple[int, ...], int]()  # for each prompt, an index into leaders
        for row, prompt in enumerate(prompts):
            place = places.setdefault(tuple(prompt.tolist()), len(leaders))
            if place == len(leaders):
                leaders.append(row)
            parents.append(place)
        logits = self._read_prompts(leaders)
        if self._drafts is not None and self._hidden:
            steps = [
                HiddenRows(row, 0, prompts[row].tolist(), self._hidden[place])
                for row, place in enumerate(parents)
            ]
            self._drafts.observe(steps)
            self._hidden = []
        if len(leaders) < len(prompts):
            of_rows = torch.tensor(parents, device="cpu")
            self.caches.reorder(torch.tensor(leaders, device="cpu")[of_rows])
            logits = logits[of_rows]
        return logits

    def _read_prompts(self, leaders: list[int]) -> Tensor:
        """Read the prompts of these rows; return the logits of their last tokens, [n, V]."""
        entries = torch.tensor(
            [[row, len(self._prompts[row]), 1, 1] for row in leaders], device="cpu"
        )
        tokens = torch.cat([self._prompts[row] for row in leaders])
        hidden = None
        if self._drafts is not None:
            hidden = self._drafts.new_hidden(len(tokens), self.caches.model.config.model_size)
        logits = self.caches.forward(tokens, entries, len(leaders), hidden_out=hidden)
        if hidden is not None:
            self._hidden = list(hidden.split(entries[:, 1].tolist()))
        return logits

    def read(self, input_ids: Tensor) -> Tensor:
        last = input_ids[:, -1].contiguous()
        if self._lookahead is not None:
            return self._lookahead.logits(last)
        return self.caches.forward(last, self._entries, len(self._entries))

    def reorder(self, parents: Tensor) -> None:
        self.caches.reorder(parents)
