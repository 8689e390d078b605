"""Times of top_k_top_p_sample and of what torch has for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, name_of
from benchmarks.harness import Case, Contestant

_FILTERS = {
    "k 50, p 0.9": {"top_k": 50, "top_p": 0.9},
    "k 50, p 0.9, with kept": {"top_k": 50, "top_p": 0.9, "return_logits": True},
    "p 0.9": {"top_p": 0.9},
    "no filter": {},
}


def chain(x: torch.Tensor) -> torch.Tensor:
    """Top-k 50, top-p 0.9, softmax and multinomial in plain torch, topk first."""
    values, tokens = x.float().topk(50, -1)
    probabilities = values.softmax(-1)
    dropped = probabilities.cumsum(-1) - probabilities >= 0.9
    drawn = torch.multinomial(probabilities.masked_fill(dropped, 0), 1)
    return tokens.gather(-1, drawn)


def _contestants(
    machine: Machine, name: str, batch: int, vocab: int, dtype: torch.dtype
) -> list[Contestant]:
    x = machine.randn(batch, vocab, dtype=dtype) * 3
    seeds, out = torch.arange(batch, device=machine.device), torch.empty_like(x)
    beside = {"torch_topk_chain": partial(chain, x)} if name == "k 50, p 0.9" else {}
    return machine.contestants(
        ours=partial(lmdecode.top_k_top_p_sample, x, seed=seeds, **_FILTERS[name]),
        limit=partial(out.copy_, x),
        sort_alone=partial(torch.sort, x, -1),
        **beside,
    )


def cases(machine: Machine) -> Iterator[Case]:
    """Yield each size and filter."""
    shapes = machine.size(
        ((1, 32000), (1, 128256), (64, 128256), (512, 131072), (1, 1 << 20), (64, 262144)),
        ((2, 1000),),
    )
    for dtype in (torch.float32, torch.bfloat16):
        for shape in shapes:
            for name in _FILTERS:
                make = partial(_contestants, machine, name, *shape, dtype)
                logits = f"{shape[0]} x {shape[1]} {name_of(dtype)}"
                yield machine.case("top_k_top_p_sample", name, make, logits=logits)
