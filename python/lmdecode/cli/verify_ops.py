"""Ops whose bits are the same at every CPU level, on fixed inputs: ``lmdecode verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lmdecode.beam.ops import beam_step, log_softmax_top_k
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.cli.verify_texts import Bits, digest
from lmdecode.kv_cache.reorder import reorder_cache_
from lmdecode.linear.packed_linear import PackedLinear
from lmdecode.sampling.ops import top_k_top_p_sample
from lmdecode.sampling.sampler import Sampler

__all__ = ["OPS", "bits_of_ops"]

_VOCABS = (1, 33, 1000, 4099, 32000)  # some end within a vector
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
_ROWS = 6
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
    for vocab in _VOCABS:
        for number, filters in enumerate(_FILTERS):
            for kind in (torch.float32, torch.bfloat16):
                logits = _values(_ROWS, vocab, seed=number).to(kind)
                yield top_k_top_p_sample(
                    logits, **filters, seed=number, return_logits=True, return_logprob=True
                )


def _stages() -> Iterator[Any]:
    for vocab in _VOCABS[1:4]:
        for number, parameters in enumerate(_STAGES):
            sampler = Sampler(
                _ROWS, vocab, seed=list(range(_ROWS)), num_logprobs=8, return_logits=True,
                **parameters,
            )  # fmt: skip
            for step in range(_STEPS):
                out = sampler.sample(_values(_ROWS, vocab, seed=10 * number + step))
                yield [tensor.clone() for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]


def _beams() -> Iterator[Any]:
    beams, requests = 3, 2
    for vocab in _VOCABS[1:]:
        state = new_beam_state(requests, beams, _STEPS + 1)
        state.lengths.fill_(1)
        parameters = beam_parameters(requests, beams, end_tokens=[7], max_lengths=_STEPS + 1)
        processors: tuple[dict[str, Any], ...] = (
            {},
            {"sequences": _integers(vocab, requests * beams, 9), "repetition_penalty": 1.3,
             "no_repeat_ngram_size": 2, "bias": _values(requests * beams, vocab, scale=0.3)},
        )  # fmt: skip
        for step in range(_STEPS):
            logits = _values(requests * beams, vocab, seed=step)
            for more in processors:
                found = log_softmax_top_k(
                    logits, _values(requests * beams, seed=step), 2 * beams, num_beams=beams, **more
                )
                yield found
            yield beam_step(state, parameters, found.scores, found.tokens, found.beams)
            yield state


def _caches() -> Iterator[Any]:
    parents = torch.tensor([2, 0, 0, 3, 1])
    for kind in (torch.float32, torch.bfloat16, torch.int8):
        for length in (3, 65, 700):
            caches = [_values(5, 2, length, 32, seed=i).clamp(-99, 99).to(kind) for i in range(2)]
            reorder_cache_(caches, parents)
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


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def bits_of_ops() -> Bits:
    """Return a digest of the results of each kind, by the kernels of this process."""
    return tuple(
        digest([_bytes(part) for part in tree_leaves(list(calls())) if isinstance(part, Tensor)])
        for calls in OPS.values()
    )
