"""``merge_attention_states`` against the same in torch calls, and one read of both outputs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import lmdecode
from benchmarks.harness import LIMIT, OURS, Case, Contestant
from benchmarks.limits import streaming_read

GROUP = "merge_attention_states"
SOURCES = ("attention/merge_attention_states",)


def merge_in_torch(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh both by their share of the sum; NaN where both are empty."""
    lse = torch.logaddexp(lse1, lse2)
    share = torch.exp(lse1 - lse)[..., None]
    return torch.lerp(o2.float(), o1.float(), share).to(o1.dtype), lse


def _contestants(
    with_peers: bool, *, dtype: torch.dtype, heads: int, tokens: int
) -> list[Contestant]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 1, heads, tokens, 128, generator=generator).to(dtype)
    lse = torch.randn(2, 1, heads, tokens, generator=generator)
    states = (outputs[0], lse[0], outputs[1], lse[1])
    ours = Contestant(OURS, partial(lmdecode.merge_attention_states, *states))
    if not with_peers:
        return [ours]
    both = outputs.view(torch.float32)
    return [
        ours,
        Contestant(LIMIT, streaming_read(both)),
        Contestant("plain torch", partial(merge_in_torch, *states)),
    ]


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` a small one of each dtype."""
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    return [
        Case(
            GROUP,
            "merge",
            {"heads": heads, "tokens": tokens, "D": 128, "dtype": name},
            partial(_contestants, dtype=dtype, heads=heads, tokens=tokens),
        )
        for name, dtype in dtypes.items()
        for heads, tokens in ([(2, 3)] if quick else [(32, 1), (32, 64), (32, 2048)])
    ]
