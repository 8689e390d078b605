"""Every bfloat16 number, NaN included, on either side of every kind of bound."""

import math

import pytest
import torch
from torch import Tensor

import lmdecode


def every_number(seed: int, device: torch.device) -> Tensor:
    """[65536] bfloat16: each bit pattern once, but for +inf, beside which nothing else counts."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    patterns[patterns == 0x7F80] = 0
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(seed))
    return patterns[order].view(torch.bfloat16).to(device)


@pytest.mark.parametrize("k", [1, 2, 100, 16000, 32500, 32639, 32640, 32643, 40000, 65000])
def test_top_k_around_every_bound(k: int, device: torch.device) -> None:
    row = every_number(k, device)[None]
    narrow = lmdecode.top_k_top_p_sample(row, top_k=k, seed=1, return_logits=True)
    wide = lmdecode.top_k_top_p_sample(row.float(), top_k=k, seed=1, return_logits=True)
    assert narrow.kept_logits is not None and wide.kept_logits is not None
    assert narrow.kept_count.item() == min(k, (row > -math.inf).sum().item())
    torch.testing.assert_close(narrow.kept_logits, wide.kept_logits, rtol=0, atol=0)
    assert torch.equal(narrow.index, wide.index) and torch.equal(narrow.status, wide.status)


@pytest.mark.parametrize(
    "bound",
    [3.0, 3.0 + 2**-20, 1e-39, 1e-45, 0.0, -0.0, -1e-45, -1e-39, -3.0 + 2**-20, -3.0, -2e38],
)
def test_min_p_at_a_bound(bound: float, device: torch.device) -> None:
    """The bound of min-p is any float32; tokens are kept from it on."""
    row = every_number(7, device)
    top = torch.tensor(bound, dtype=torch.float64).abs().item() + 1.0
    row = torch.where(row > top, torch.nan, row).contiguous()
    largest = row[~row.isnan()].max().item()
    # exp(bound - largest), so that the bound comes to about this number; far below it, to nothing.
    min_p = math.exp(max(bound - largest, -80.0))
    narrow = lmdecode.top_k_top_p_sample(row[None], min_p=min_p, seed=1, return_logits=True)
    wide = lmdecode.top_k_top_p_sample(row[None].float(), min_p=min_p, seed=1, return_logits=True)
    assert narrow.kept_logits is not None and wide.kept_logits is not None
    assert 0 < narrow.kept_count.item() <= (row > -math.inf).sum().item()
    torch.testing.assert_close(narrow.kept_logits, wide.kept_logits, rtol=0, atol=0)
    assert torch.equal(narrow.index, wide.index)


def test_both_zeros_reach_zero(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    row = -1.0 - torch.rand(20000, generator=generator)
    zeros = torch.randperm(20000, generator=generator)[:8000]
    row[zeros] = torch.where(zeros % 2 == 0, 0.0, -0.0)
    row = row.to(torch.bfloat16).to(device)
    out = lmdecode.top_k_top_p_sample(row[None], top_k=1000, seed=1, return_logits=True)
    assert out.kept_logits is not None
    kept = (out.kept_logits[0] > -math.inf).nonzero().flatten()
    assert torch.equal(kept, zeros.sort().values[:1000].to(device))
