"""Inputs of ops that are checked and compiled, and the comparison with what is not compiled."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.cases import assert_same_bits

BATCH, VOCAB = 3, 40


def logits(kind: str) -> torch.Tensor:
    x = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(0))
    if kind == "columns":
        return x.t().contiguous().t()
    if kind == "steps":
        return torch.stack((x, x), dim=-1)[..., 0].bfloat16()
    return x.half() if kind == "half" else x


def check_compiled(function: Callable[..., Any], *calls: tuple, **options: Any) -> None:
    """Compile in one graph, then compare each call with the uncompiled one."""
    compiled = torch.compile(function, fullgraph=True, **options)
    for arguments in calls:
        got, want = compiled(*arguments), function(*arguments)
        assert type(got) is type(want)
        assert_same_bits(got, want)
