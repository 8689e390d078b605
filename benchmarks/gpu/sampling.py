"""Times of top_k_top_p_sample and of what torch has for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import lmdecode
from benchmarks.gpu.machine import Machine, header, name_of, row


def chain(x: torch.Tensor) -> torch.Tensor:
    """Top-k 50, top-p 0.9, softmax and multinomial in plain torch, topk first."""
    values, tokens = x.float().topk(50, -1)
    probabilities = values.softmax(-1)
    dropped = probabilities.cumsum(-1) - probabilities >= 0.9
    drawn = torch.multinomial(probabilities.masked_fill(dropped, 0), 1)
    return tokens.gather(-1, drawn)


def run(machine: Machine) -> Iterator[str]:
    """Time each size."""
    sample = lmdecode.top_k_top_p_sample
    yield "Microseconds, median: in a CUDA graph (and called from Python)."
    yield from header(
        ["logits", "a copy", "k 50, p 0.9", "with kept", "p 0.9", "no filter", "topk chain", "sort"]
    )
    shapes = machine.size(
        ((1, 32000), (1, 128256), (64, 128256), (512, 131072), (1, 1 << 20), (64, 262144)),
        ((2, 1000),),
    )
    for dtype in (torch.float32, torch.bfloat16):
        for batch, vocab in shapes:
            x = machine.randn(batch, vocab, dtype=dtype) * 3
            seeds = torch.arange(batch, device=machine.device)
            out = torch.empty_like(x)
            kept = dict(top_k=50, top_p=0.9, seed=seeds, return_logits=True)
            yield row(
                [
                    f"{batch} x {vocab} {name_of(dtype)}",
                    machine.times(lambda x=x, out=out: out.copy_(x)),
                    machine.times(lambda x=x, s=seeds: sample(x, top_k=50, top_p=0.9, seed=s)),
                    machine.times(lambda x=x, a=kept: sample(x, **a)),
                    machine.times(lambda x=x, s=seeds: sample(x, top_p=0.9, seed=s)),
                    machine.times(lambda x=x, s=seeds: sample(x, seed=s)),
                    f"({machine.microseconds(lambda x=x: chain(x)):.1f})",
                    f"({machine.microseconds(lambda x=x: torch.sort(x, -1)):.1f})",
                ]
            )
