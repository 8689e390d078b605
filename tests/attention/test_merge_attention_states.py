"""``merge_attention_states``: attention over two sets of keys is attention over both."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import lmdecode
from lmdecode import merge_attention_states as merge
from lmdecode import sliding_window_attention as attend
from lmdecode.reference import merge_attention_states as reference
from tests.attention.attention_cases import DTYPES, normal
from tests.support.op_contract import assert_op_refuses

INF = float("inf")


def states(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    rows = shape[:-1]
    return [
        normal(*shape, seed=1, dtype=dtype), normal(*rows, seed=2) * 5,
        normal(*shape, seed=3, dtype=dtype), normal(*rows, seed=4) * 5,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 16, 37, 128])
def test_reference(dtype: torch.dtype, size: int, device: torch.device) -> None:
    arguments = states(2, 3, 5, size, dtype=dtype)
    arguments[1][0, 0, :2] = -INF
    arguments[3][0, 0, 1:3] = -INF
    arguments[0][0, 0, :2] = float("nan")  # of no weight: never looked at
    out, lse = (x.cpu() for x in merge(*(x.to(device) for x in arguments)))
    want, want_lse = reference(*arguments)
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out, want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=2e-7, atol=2e-7)
    assert not out[0, 0, 1].any() and lse[0, 0, 1] == -INF


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Of any bits: ties, NaN and infinities too; the last elements of a row are no whole vector."""
    bits = torch.randint(-(2**15), 2**15, (2, 1, 2, 500, 100), dtype=torch.int16)
    one, other = bits.view(dtype)
    lse = torch.zeros(1, 2, 500)
    out, _ = merge(one, lse, other, lse)
    want = (one.float() / 2 + other.float() / 2).to(dtype)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400), st.data())
def test_parts_make_the_whole(keys: int, data: st.DataObject) -> None:
    """Any cut of the keys; the sink belongs to one part."""
    cut = data.draw(st.integers(0, keys))
    q, k = normal(1, 4, 3, 32), normal(1, 2, keys, 32, seed=1)
    v, sinks = normal(1, 2, keys, 32, seed=2), normal(4, seed=3)
    everything = {"window_right": None, "return_lse": True}
    want = attend(q, k, v, sinks=sinks, **everything)
    first = attend(q, k[:, :, :cut], v[:, :, :cut], sinks=sinks, **everything)
    second = attend(q, k[:, :, cut:], v[:, :, cut:], **everything)
    for got, whole in zip(merge(*first, *second), want, strict=True):
        torch.testing.assert_close(got, whole, rtol=1e-5, atol=2e-6)


def test_ragged() -> None:
    out, other = normal(7, 3, 16), normal(7, 3, 16, seed=1)
    lse, other_lse = normal(3, 7, seed=2), normal(3, 7, seed=3)
    got, got_lse = merge(out, lse, other, other_lse)
    dense = [
        out.transpose(0, 1)[None], lse[None], other.transpose(0, 1)[None], other_lse[None],
    ]  # fmt: skip
    want, want_lse = merge(*dense)
    assert torch.equal(got, want[0].transpose(0, 1)) and torch.equal(got_lse, want_lse[0])


def test_empty() -> None:
    out, lse = merge(*(x[:0] for x in states(2, 3, 5, 40)))
    assert out.shape == (0, 3, 5, 40) and lse.shape == (0, 3, 5)


def test_an_infinite_weight_has_no_share() -> None:
    o, lse = torch.ones(1, 1, 1, 4), torch.tensor([[[INF]]])
    for op in (merge, reference):
        out, total = op(o, lse, o, torch.zeros(1, 1, 1))
        assert out.isnan().all()
        assert total.item() == INF or total.isnan().all()


def test_nan_is_kept() -> None:
    arguments = states(1, 1, 3, 16)
    arguments[1][0, 0, 0] = float("nan")
    arguments[2][0, 0, 1, 2] = float("nan")
    out, lse = merge(*arguments)
    assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan()
    assert out[0, 0, 1].isnan().sum() == 1 and out[0, 0, 2].isfinite().all()


GOOD = states(1, 2, 3, 16)


def test_a_gradient_is_refused() -> None:
    wrong = (r"o2 requires a gradient", {2: GOOD[2].clone().requires_grad_()})
    assert_op_refuses(merge, wrong, *GOOD)


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


def error_over_torchs(
    op: Callable[..., torch.Tensor], seeds: int, heads: int, keys: int, size: int
) -> float:
    """Return our error over torch's, for rows with scores of some tens."""
    ours = theirs = 0.0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        shapes = ((2, heads, n, size) for n in (1, keys, keys))
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        exact = torch.softmax(q.double() @ k.double().mT, dim=-1) @ v.double()
        plain = torch.softmax(q @ k.mT, dim=-1) @ v
        ours += (op(q, k, v, scale=1.0) - exact).abs().max().item()
        theirs += (plain - exact).abs().max().item()
    return ours / theirs


@pytest.mark.parametrize("head_size", [33, 64, 128])
def test_error_of_a_step_is_that_of_torch(head_size: int) -> None:
    """On average, of scores of some tens."""
    assert error_over_torchs(lmdecode.sliding_window_decode, 100, 2, 40, head_size) <= 1.3


@pytest.mark.parametrize("run_at_capability", ["default"], indirect=True)
def test_error_of_large_scores_without_fused_operations(
    run_at_capability: Callable[[str], list[str]],
) -> None:
    """Chains of 128 additions would have 2.3 times torch's error."""
    code = """
from test_merge_attention_states import error_over_torchs, lmdecode
print(error_over_torchs(lmdecode.sliding_window_attention, 40, 3, 65, 128))
"""
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
