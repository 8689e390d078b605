"""What others run for one sampling step, from logits [B, V] to token ids [B] or [B, 1]."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# A logits processor of transformers: text [B, n] and scores [B, V] to scores.
Processor = Callable[[Tensor, Tensor], Tensor]


class Filter(NamedTuple):
    """Parameters of the step; None: stage off."""

    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None


def has_transformers() -> bool:
    """Tell whether the package is installed."""
    return importlib.util.find_spec("transformers") is not None


def transformers_chain(logits: Tensor, filter_: Filter) -> Callable[[], Tensor]:
    """Build what ``generate()`` does: float32, its warper classes, softmax, multinomial."""
    from transformers.generation import logits_process

    chain: list[Processor] = []
    if filter_.temperature is not None:
        chain.append(logits_process.TemperatureLogitsWarper(filter_.temperature))
    if filter_.top_k is not None:
        chain.append(logits_process.TopKLogitsWarper(filter_.top_k))
    if filter_.top_p is not None:
        chain.append(logits_process.TopPLogitsWarper(filter_.top_p))
    return processed_draw(logits, chain, torch.zeros(len(logits), 1, dtype=torch.int64))


def processed_draw(
    logits: Tensor, chain: Sequence[Processor], input_ids: Tensor
) -> Callable[[], Tensor]:
    """Build float32, processors of transformers on text [B, n], softmax, multinomial."""

    def step() -> Tensor:
        scores = logits.float()
        for processor in chain:
            scores = processor(input_ids, scores)
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)

    return step


def vllm_torch(logits: Tensor, filter_: Filter) -> Callable[[], Tensor]:
    """Build vLLM's torch sampler: one ascending sort, both masks in sorted order, scatter, race.

    Written from the description of its algorithm. Its per-request k and p are [B] tensors.
    """
    batch, vocab = logits.shape
    kth = top_p = None
    if filter_.top_k is not None:
        kth = torch.full((batch, 1), vocab - min(filter_.top_k, vocab))
    if filter_.top_p is not None:
        top_p = torch.full((batch, 1), filter_.top_p)
    temperature = None
    if filter_.temperature is not None:
        temperature = torch.full((batch, 1), filter_.temperature)

    def step() -> Tensor:
        scores = logits.float()
        if temperature is not None:
            scores = scores / temperature
        if kth is not None or top_p is not None:
            ascending, order = scores.sort(dim=-1)
            if kth is not None:
                ascending.masked_fill_(ascending < ascending.gather(1, kth), -torch.inf)
            if top_p is not None:
                below = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
                below[:, -1] = False
                ascending.masked_fill_(below, -torch.inf)
            scores = torch.empty_like(scores).scatter_(-1, order, ascending)
        probabilities = scores.softmax(dim=-1)
        noise = torch.empty_like(probabilities).exponential_()
        return probabilities.div_(noise).argmax(dim=-1)

    return step


# Tokens that plain torch takes before it looks at top-p alone; where their mass is too small, all.
_TOP_P_GUESS = 8192


def plain_torch(logits: Tensor, filter_: Filter) -> Callable[[], Tensor]:
    """Build the best that we found in a few torch calls: top-k first, the rest on what it left."""

    def choose(values: Tensor, indices: Tensor, probabilities: Tensor) -> Tensor:
        if filter_.top_p is not None:
            before = probabilities.cumsum(dim=-1) - probabilities
            probabilities = probabilities.masked_fill(before >= filter_.top_p, 0)
        return indices.gather(1, torch.multinomial(probabilities, num_samples=1))

    def with_top_k() -> Tensor:
        values, indices = logits.topk(min(filter_.top_k, logits.shape[-1]), dim=-1)
        values = values.float()
        if filter_.temperature is not None:
            values = values / filter_.temperature
        return choose(values, indices, values.softmax(dim=-1))

    def with_top_p() -> Tensor:
        scores = logits.float()
        if filter_.temperature is not None:
            scores = scores / filter_.temperature
        probabilities = scores.softmax(dim=-1)
        values, indices = probabilities.topk(min(_TOP_P_GUESS, logits.shape[-1]), dim=-1)
        if bool((values.sum(dim=-1) < filter_.top_p).any()):
            values, indices = probabilities.sort(dim=-1, descending=True)
        return choose(values, indices, values)

    def without_filter() -> Tensor:
        scores = logits.float()
        if filter_.temperature is not None:
            scores = scores / filter_.temperature
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1)

    if filter_.top_k is not None:
        return with_top_k
    return with_top_p if filter_.top_p is not None else without_filter
