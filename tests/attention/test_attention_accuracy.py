"""float32 attention at large heads, next to torch's own, both against float64."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import lmdecode


@pytest.mark.parametrize("head_size", [128, 256, 384, 512, 1024])
def test_error_at_large_heads_is_that_of_torch(head_size: int) -> None:
    """One chain of additions along the head has 1.6, 1.7, 2.2 and 3.3 times torch's error."""
    ours = theirs = 0.0
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, 160, head_size, generator=generator) for _ in range(3))
        q = q * 3.0
        want = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        plain = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = lmdecode.sliding_window_attention(q, k, v, window=None)
        ours += (out - want).square().mean().item()
        theirs += (plain - want).square().mean().item()
    assert ours**0.5 <= 1.3 * theirs**0.5


@pytest.mark.parametrize("head_size", [33, 64, 128])
def test_error_of_a_step_is_that_of_torch(head_size: int) -> None:
    """On average, of scores of some tens."""
    ours = theirs = 0.0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 2, n, head_size, generator=generator) for n in (1, 40, 40))
        exact = torch.softmax(q.double() @ k.double().mT, dim=-1) @ v.double()
        plain = torch.softmax(q @ k.mT, dim=-1) @ v
        out = lmdecode.sliding_window_decode(q, k, v, scale=1.0)
        ours += (out - exact).abs().max().item()
        theirs += (plain - exact).abs().max().item()
    assert ours <= 1.3 * theirs


def print_error_of_large_scores() -> None:
    """Print our error over torch's, for rows with scores of some tens."""
    ours = theirs = 0.0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 3, n, 128, generator=generator) for n in (1, 65, 65))
        exact = torch.softmax(q.double() @ k.double().mT, dim=-1) @ v.double()
        plain = torch.softmax(q @ k.mT, dim=-1) @ v
        out = lmdecode.sliding_window_attention(q, k, v, scale=1.0)
        ours += (out - exact).abs().max().item()
        theirs += (plain - exact).abs().max().item()
    print(ours / theirs)


@pytest.mark.parametrize("run_at_capability", ["default"], indirect=True)
def test_error_of_large_scores_without_fused_operations(
    run_at_capability: Callable[[str], list[str]],
) -> None:
    """Chains of 128 additions would have 2.3 times torch's error."""
    code = "import test_attention_accuracy as t; t.print_error_of_large_scores()"
    (error,) = run_at_capability(code)
    assert float(error) <= 1.3


@pytest.mark.parametrize("head_size", [129, 200, 256, 384, 700])
def test_bits_do_not_depend_on_chunks(head_size: int) -> None:
    generator = torch.Generator().manual_seed(head_size)
    q, k, v = (torch.randn(2, 4, 90, head_size, generator=generator) for _ in range(3))
    want = lmdecode.sliding_window_attention(q, k, v, window=64)
    for at in (1, 37, 89):
        late = lmdecode.sliding_window_attention(q[:, :, at:], k, v, window=64)
        assert torch.equal(late, want[:, :, at:])
