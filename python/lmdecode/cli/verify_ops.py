"""Ops whose bits are the same at every CPU level, on fixed inputs: ``lmdecode verify``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lmdecode._memory import bytes_of
from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.cli.verify_texts import Bits, digest
from lmdecode.kv_cache.reorder import reorder_cache_
from lmdecode.linear.packed_linear import PackedLinear
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.sampler import Sampler

__all__ = ["OPS", "bits_of_ops"]

# Vocabularies, some of which end within a vector, and rows: many of the small ones, where the last
# bit of each weight shows in a log-probability.
_VOCABS = ((1, 4), (5, 128), (17, 128), (33, 128), (100, 64), (1000, 16), (4099, 4), (32000, 2))
_FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    {"top_p": 0.6, "min_p": 0.02},
    {"min_p": 0.1, "temperature": 1.7},
)
_STAGES: tuple[dict[str, Any], ...] = (
    {"typical_p": 0.9},
    {"epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    {"top_n_sigma": 1.0, "xtc_probability": 0.9, "xtc_threshold": 0.05},
    {"top_h": 0.5, "dynamic_temperature_range": 0.5},
    {"mirostat_tau": 3.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.1,
     "no_repeat_ngram_size": 2, "dry_multiplier": 0.8, "top_k": 40},
)  # fmt: skip
_SAMPLER_VOCABS = ((33, 64), (1000, 16), (4099, 4))
_BEAM_VOCABS = ((17, 64), (33, 64), (1000, 8), (4099, 4))  # vocabularies, and requests
_STEPS = 4


def _values(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Numbers of a seed; in the last dimension some are equal, and one is -inf."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, generator=generator) * scale
    if shape[-1] > 8:
        found[..., 2::7] = found[..., 1:2]
        found[..., 5] = -torch.inf
    return found


def _integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _samples() -> Iterator[Any]:
    for vocab, rows in _VOCABS:
        for number, filters in enumerate(_FILTERS):
            for kind in (torch.float32, torch.bfloat16):
                logits = _values(rows, vocab, seed=number).to(kind)
                yield top_k_top_p_sample(
                    logits, **filters, seed=number, return_logits=True, return_logprob=True
                )


def _stages() -> Iterator[Any]:
    for vocab, rows in _SAMPLER_VOCABS:
        for number, parameters in enumerate(_STAGES):
            sampler = Sampler(
                rows, vocab, seed=list(range(rows)), num_logprobs=8, return_logits=True,
                **parameters,
            )  # fmt: skip
            for step in range(_STEPS):
                out = sampler.sample(_values(rows, vocab, seed=10 * number + step))
                yield [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]


def _beams() -> Iterator[Any]:
    beams = 3
    for vocab, requests in _BEAM_VOCABS:
        state = new_beam_state(requests, beams, _STEPS + 1)
        state.lengths.fill_(1)
        parameters = beam_parameters(requests, beams, end_tokens=[7], max_lengths=_STEPS + 1)
        rows = requests * beams
        processors: tuple[dict[str, Any], ...] = (
            {},
            {"sequences": _integers(vocab, rows, 9), "repetition_penalty": 1.3,
             "no_repeat_ngram_size": 2, "bias": _values(rows, vocab, scale=0.3),
             "suppressed_tokens": _integers(vocab, 3), "end_tokens": torch.tensor([7]),
             "min_lengths": 12, "diversity_tokens": _integers(vocab, requests, 2),
             "diversity_penalty": 0.4},
        )  # fmt: skip
        for step in range(_STEPS):
            logits, scores = _values(rows, vocab, seed=step), _values(rows, seed=step)
            for more in processors:
                found = log_softmax_top_k(logits, scores, 2 * beams, num_beams=beams, **more)
                yield found
            yield beam_step(state, parameters, found.scores, found.tokens, found.beams)
            yield state


def _caches() -> Iterator[Any]:
    parents = torch.tensor([2, 0, 0, 3, 1])
    shapes = ((0, (5, 2, 3, 32)), (0, (5, 2, 700, 31)), (1, (300, 5, 7)), (0, (5, 2, 1700, 128)))
    for kind in (torch.float32, torch.bfloat16, torch.int8):
        for dim, shape in shapes:
            numbers = torch.arange(math.prod(shape), dtype=torch.int32)
            caches = [((i + 1) * numbers % 101).to(kind).view(shape) for i in range(2)]
            reorder_cache_(caches, parents, batch_dim=dim)
            yield caches


def _integer_products() -> Iterator[Any]:
    for dtype in ("int8", "int4"):
        for size_in, size_out in ((96, 40), (256, 300)):
            weight = _values(size_out, size_in, scale=0.1).clamp(-9, 9)
            layer = PackedLinear(weight, dtype=dtype)
            for rows in (1, 5, 33):
                yield layer(_values(rows, size_in, seed=rows).clamp(-9, 9))


#: Their kinds, and what yields the results of calls.
OPS: dict[str, Callable[[], Iterator[Any]]] = {
    "top_k_top_p_sample": _samples,
    "Sampler": _stages,
    "beam search": _beams,
    "reorder_cache_": _caches,
    "int8 and int4 products": _integer_products,
}


def bits_of_ops() -> Bits:
    """Return a digest of the results of each kind, by the kernels of this process."""
    return tuple(
        digest(
            [bytes_of(x.contiguous()) for x in tree_leaves(list(calls())) if isinstance(x, Tensor)]
        )
        for calls in OPS.values()
    )
