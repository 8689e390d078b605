"""``sliding_window_attention`` against float64: every option, any layout, what never changes."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import lmdecode
from lmdecode import sliding_window_attention as attend
from tests.attention.attention_cases import (
    DTYPES,
    AttentionCase,
    assert_accurate,
    normal,
    random_cases,
)
from tests.support.op_contract import assert_same_bits
from tests.support.processes import run_python

INF = float("inf")


def qkv(
    queries: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 32,
    value_size: int = 32,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    return [
        normal(batch, heads, queries, size, seed=1, dtype=dtype),
        normal(batch, kv_heads, keys, size, seed=2, dtype=dtype),
        normal(batch, kv_heads, keys, value_size, seed=3, dtype=dtype),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_random_cases(seed: int, device: torch.device) -> None:
    for case in random_cases(seed, 40):
        assert_accurate(case.to(device).call(attend, return_lse=True), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 100, 256, 600, None])
def test_long_sequences(dtype: torch.dtype, window: int | None, device: torch.device) -> None:
    """Several steps of keys and tiles of queries; torch's own attention with a mask beside it."""
    q, k, v = qkv(700, 700, size=128, value_size=128, dtype=dtype)
    case = AttentionCase("long", q, k, v, {"window": window})
    mask = ~lmdecode.swa_mask(700, window or 700, form="bool")
    torchs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert_accurate(case.to(device).call(attend, return_lse=True), case, plain=torchs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 40, 96, 112, 192, 256, 300])
def test_head_sizes(dtype: torch.dtype, size: int, device: torch.device) -> None:
    for value_size in (size, 24, 256):
        q, k, v = qkv(50, 90, size=size, value_size=value_size, dtype=dtype)
        case = AttentionCase(f"{size}, {value_size}", q, k, v, {"window": 33})
        assert_accurate(case.to(device).call(attend, return_lse=True), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(dtype: torch.dtype, device: torch.device) -> None:
    """Maxima that rise from step to step, weights that underflow."""
    q, k, v = qkv(40, 1000, dtype=dtype)
    k = k * torch.linspace(1, 60, 1000)[:, None].to(dtype)
    for sign in (1.0, -1.0):
        for keys in (k, k.flip(2)):
            case = AttentionCase("large", q * sign, keys, v)
            assert_accurate(case.to(device).call(attend, return_lse=True), case)


def seen_keys(out: torch.Tensor) -> list[list[int]]:
    """Keys that each query of head 0 saw, where v is the identity and q is 0."""
    return [row.nonzero().flatten().tolist() for row in out[0, 0]]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 150), st.integers(1, 700), st.integers(1, 800),
    st.one_of(st.none(), st.integers(0, 300)),
)  # fmt: skip
def test_every_window_shows_exactly_its_keys(
    queries: int, keys: int, window: int, right: int | None
) -> None:
    """Around the edges of steps, groups and tiles: by values that tell how many keys there were."""
    q, k = torch.zeros(1, 3, queries, 16), torch.zeros(1, 1, keys, 16)
    v = torch.arange(keys, dtype=torch.float32)[None, None, :, None].expand(1, 1, keys, 16)
    out, lse = attend(q, k, v, window=window, window_right=right, return_lse=True)
    position = torch.arange(keys - queries, keys)
    first = (position - window + 1).clamp(min=0)
    last = (position + (keys + queries if right is None else right)).clamp(max=keys - 1)
    count = (last - first + 1).clamp(min=0)
    assert torch.equal(lse.exp().round().long(), count.expand(1, 3, -1))
    mean = torch.where(count > 0, (first + last) / 2, 0.0)
    torch.testing.assert_close(out[..., 0], mean.expand(1, 3, -1), rtol=1e-5, atol=1e-4)


def test_rows_without_keys_are_zero() -> None:
    for dtype in DTYPES:
        q, k, v = qkv(6, 4, dtype=dtype)
        out, lse = attend(q, k, v, return_lse=True)
        assert torch.equal(out[:, :, :2], torch.zeros_like(out[:, :, :2]))
        assert (lse[:, :, :2] == -INF).all() and lse[:, :, 2:].isfinite().all()
        out, lse = attend(q, k[:, :, :0], v[:, :, :0], return_lse=True)
        assert not out.any() and (lse == -INF).all()
        sinks = torch.tensor([0.5, -1.0, 3.0, -INF])
        out, lse = attend(q, k, v, sinks=sinks, return_lse=True)
        assert not out[:, :, :2].any()
        torch.testing.assert_close(lse[0, :, 0], sinks)


def test_empty() -> None:
    for shape in ((0, 4, 5, 16), (2, 4, 0, 16)):
        q = torch.zeros(shape)
        k = torch.zeros(shape[0], 2, 5, 16)
        out, lse = attend(q, k, k, return_lse=True)
        assert out.shape == shape and lse.shape == shape[:3]
    none = torch.tensor([0])
    ragged = torch.zeros(0, 2, 16)
    assert attend(ragged, ragged, ragged, cu_seqlens_q=none).shape == (0, 2, 16)


GUARD_SCRIPT = """
import mmap, numpy, torch, lmdecode, ctypes
page, rows = mmap.PAGESIZE, mmap.PAGESIZE * 8 // 64
memory = mmap.mmap(-1, 16 * page)
cache = torch.from_numpy(numpy.frombuffer(memory, dtype=numpy.float32)).view(1, 1, -1, 16)
cache.normal_()
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
# The first half may not be read, nor the last page.
assert libc.mprotect(ctypes.c_void_p(address), 8 * page, 0) == 0
assert libc.mprotect(ctypes.c_void_p(address + 15 * page), page, 0) == 0
keys = cache.shape[2]
length, window = keys - page // 64, keys // 2 - page // 64 - 40
q = torch.randn(1, 4, 41, 16)
for op in (lmdecode.sliding_window_attention, lmdecode.sliding_window_decode):
    out = op(q, cache, cache, window=window, kv_lengths=torch.tensor([length]))
    assert out.isfinite().all()
print("only what is visible was read", flush=True)
lmdecode.sliding_window_attention(
    q, cache, cache, window=window + 2, kv_lengths=torch.tensor([length])
)
print("more was read")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as on Linux")
def test_keys_out_of_the_window_are_not_read() -> None:
    """Nor those behind kv_lengths: both lie in memory that may not be read."""
    run = run_python("-c", GUARD_SCRIPT)
    assert run.stdout == "only what is visible was read\n", run.stderr
    assert run.returncode < 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 70, 256, None])
def test_chunks_give_the_bits_of_the_whole(
    dtype: torch.dtype, window: int | None, device: torch.device
) -> None:
    """A prompt in chunks that attend to the cache so far."""
    q, k, v = (x.to(device) for x in qkv(600, 600, dtype=dtype, size=48, value_size=80))
    whole, whole_lse = attend(q, k, v, window=window, return_lse=True)
    for sizes in ([1, 599], [100, 250, 250], [64] * 9 + [24], [7, 300, 1, 1, 291]):
        end = 0
        for size in sizes:
            begin, end = end, end + size
            part, lse = attend(
                q[:, :, begin:end], k[:, :, :end], v[:, :, :end], window=window, return_lse=True
            )
            assert torch.equal(part, whole[:, :, begin:end])
            assert torch.equal(lse, whole_lse[:, :, begin:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_alone(dtype: torch.dtype) -> None:
    q, k, v = qkv(333, 400, batch=3, heads=6, dtype=dtype)
    options: dict[str, Any] = {"window": 90, "return_lse": True}
    sinks, first = normal(6), [0, 1, 2]  # the heads of the first KV head
    whole = attend(q, k, v, sinks=sinks, **options)
    some = attend(q[:, first], k[:, :1], v[:, :1], sinks=sinks[first], **options)
    assert_same_bits(some, [x[:, first] for x in whole])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_sequences_give_the_bits_of_dense_ones(
    dtype: torch.dtype, device: torch.device
) -> None:
    lengths, kv_lengths = [50, 0, 1, 130], [70, 3, 300, 130]
    ends = [torch.tensor([0, *x], device=device).cumsum(0) for x in (lengths, kv_lengths)]
    q = normal(181, 4, 32, seed=1, dtype=dtype).to(device)
    k, v = (normal(503, 2, 32, seed=s, dtype=dtype).to(device) for s in (2, 3))
    out, lse = attend(
        q, k, v, window=40, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], return_lse=True
    )
    assert lse.shape == (4, 181)
    for i in range(4):
        a, b, c, d = (int(e[j]) for e in ends for j in (i, i + 1))
        dense, dense_lse = attend(
            *(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])), window=40, return_lse=True
        )
        assert torch.equal(out[a:b], dense[0].transpose(0, 1))
        assert torch.equal(lse[:, a:b], dense_lse[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_give_the_bits_of_repeated_heads(dtype: torch.dtype) -> None:
    q, k, v = qkv(90, 90, heads=6, kv_heads=2, dtype=dtype)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    assert torch.equal(attend(q, k, v, window=20), attend(q, *repeated, window=20))


def test_a_window_of_everything_is_none() -> None:
    q, k, v = qkv(300, 300)
    for window in (300, 301, 2**62):
        assert torch.equal(attend(q, k, v, window=window), attend(q, k, v))
    assert torch.equal(attend(q, k, v, window_right=2**62), attend(q, k, v, window_right=None))


def test_heads_in_the_same_memory() -> None:
    q, k, _ = qkv(60, 80)
    shared = k[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(attend(q, shared, shared), attend(q, shared.contiguous(), shared.clone()))


@pytest.mark.parametrize("shape", [(200, 200), (50, 300), (300, 50), (1, 90)])
def test_a_mask_that_is_a_window_gives_the_bits_of_the_window(shape: tuple[int, int]) -> None:
    queries, keys = shape
    q, k, v = qkv(queries, keys)
    position = torch.arange(keys - queries, keys)[:, None]
    distance = position - torch.arange(keys)
    for window, right in ((None, 0), (1, 0), (40, 0), (40, 7), (None, None), (12, None)):
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if window is not None:
            hidden |= distance >= window
        if right is not None:
            hidden |= distance < -right
        want = attend(q, k, v, window=window, window_right=right)
        additive = torch.zeros(queries, keys).masked_fill(hidden, -INF)
        for mask in (hidden, additive, additive.clamp(min=-65536.0), additive.half()):
            assert torch.equal(attend(q, k, v, attn_mask=mask), want)
        assert torch.equal(attend(q, k, v, attn_mask=~hidden, mask_convention="visible"), want)


def test_packed_documents_are_not_taken_for_a_window() -> None:
    """Their first row and column are those of a causal mask, their last row that of a window."""
    ends = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    hidden = (ends[:, None] != ends) | (torch.arange(9)[:, None] < torch.arange(9))
    case = AttentionCase("documents", *qkv(9, 9), {"attn_mask": hidden})
    assert_accurate(case.call(attend, return_lse=True), case)
    q = torch.zeros(1, 1, 9, 16)
    v = torch.eye(9)[None, None]
    assert seen_keys(attend(q, q, v, attn_mask=hidden)) == [
        [0], [0, 1], [0, 1, 2], [3], [3, 4], [5], [5, 6], [5, 6, 7], [5, 6, 7, 8],
    ]  # fmt: skip


def test_one_element_makes_another_mask() -> None:
    q, k, v = qkv(70, 70)
    base = lmdecode.swa_mask(70, 20, form="bool")
    for row, column in ((0, 0), (69, 69), (35, 34), (35, 60), (69, 0)):
        mask = base.clone()
        mask[row, column] ^= True
        case = AttentionCase("one element", q, k, v, {"attn_mask": mask})
        assert_accurate(case.call(attend, return_lse=True), case)
        difference = attend(q, k, v, attn_mask=mask) - attend(q, k, v, window=20)
        differs = (difference.abs() > 1e-4).any(-1)
        assert differs[0, 0].nonzero().flatten().tolist() == [row]


def test_masks_of_rows_and_heads() -> None:
    """A window for one head alone is no window of the call."""
    q, k, v = qkv(40, 40, batch=2)
    mask = lmdecode.swa_mask(40, 9, form="bool").expand(2, 4, -1, -1).clone()
    assert torch.equal(attend(q, k, v, attn_mask=mask), attend(q, k, v, window=9))
    mask[1, 3] = lmdecode.swa_mask(40, 10, form="bool")
    out = attend(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out[0], attend(q, k, v, window=9)[0])
    torch.testing.assert_close(out[1, 3], attend(q, k, v, window=10)[1, 3])


def test_the_float_mask_of_a_row_that_sees_nothing() -> None:
    """-65536 is finite in float32: a plain softmax would attend to what is masked."""
    q, k, v = qkv(3, 3)
    mask = torch.full((3, 3), -65536.0)
    mask[1, 2] = 0.25
    out, lse = attend(q, k, v, attn_mask=mask, return_lse=True)
    assert not out[:, :, [0, 2]].any() and (lse[:, :, [0, 2]] == -INF).all()
    torch.testing.assert_close(out[0, :, 1], v[0, :, 2].repeat_interleave(2, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_goes_where_it_is_seen(dtype: torch.dtype) -> None:
    q, k, v = qkv(30, 600, dtype=dtype)
    bad = q.clone()
    bad[0, 1, 7] = float("nan")
    out, lse = attend(bad, k, v, return_lse=True)
    want = attend(q, k, v)
    assert out[0, 1, 7].isnan().all() and lse[0, 1, 7].isnan()
    out[0, 1, 7] = want[0, 1, 7]
    assert torch.equal(out, want)
    bad = k.clone()
    bad[0, 0, 575] = float("nan")  # the position of query 5
    out = attend(q, bad, v, window=10)
    assert out[0, :2, 5:15].isnan().all()
    assert out[0, :2, :5].isfinite().all() and out[0, :2, 15:].isfinite().all()
    assert torch.equal(out[0, 2:], attend(q, k, v, window=10)[0, 2:])


CAPABILITY_SCRIPT = """
import torch
import test_sliding_window_attention as tests
cpu = torch.device("cpu")
tests.test_random_cases(1, cpu)
for dtype in tests.DTYPES:
    tests.test_long_sequences(dtype, 100, cpu)
    tests.test_head_sizes(dtype, 112, cpu)
    tests.test_large_scores(dtype, cpu)
    tests.test_chunks_give_the_bits_of_the_whole(dtype, 70, cpu)
    tests.test_heads_alone(dtype)
    tests.test_nan_goes_where_it_is_seen(dtype)
tests.test_rows_without_keys_are_zero()
tests.test_heads_in_the_same_memory()
"""


@pytest.mark.slow
def test_cpu_capability(run_at_capability: Callable[[str], list[str]]) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []
