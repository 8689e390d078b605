"""``RingKVCache`` against a list of all tokens, and its attention against that to all of them."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmdecode
from lmdecode import RingKVCache
from lmdecode.reference import ring_cache_append_ as append_as_reference
from lmdecode.reference import sliding_window_attention as reference
from tests.kv_cache.cache_memory import filled, on_device, raw
from tests.support.op_contract import WrongCall, assert_op_refuses, assert_refused, wrong_calls

BATCH, HEADS, SIZE, VALUE_SIZE = 3, 2, 4, 6


class Tokens:
    """All tokens of a sequence of each row: the model that a ring is compared with."""

    def __init__(self, window: int, sinks: int) -> None:
        self.window, self.sinks = window, sinks
        self.k = torch.empty(BATCH, HEADS, 0, SIZE)
        self.v = torch.empty(BATCH, HEADS, 0, VALUE_SIZE)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)

    def __len__(self) -> int:
        return self.k.shape[2]

    def held(self, length: int | None = None) -> list[int]:
        length = self.window if length is None else length
        first = max(self.sinks, len(self) - length)
        return [*range(min(self.sinks, len(self))), *range(first, len(self))]

    def check(self, cache: RingKVCache) -> None:
        assert cache.num_tokens == len(self)
        keys, values = cache.ordered()
        assert torch.equal(keys, self.k[:, :, self.held()])
        assert torch.equal(values, self.v[:, :, self.held()])
        assert torch.equal(cache.keys, keys) and torch.equal(cache.values, values)


def make(window: int, capacity: int | None = None, sinks: int = 0) -> RingKVCache:
    return RingKVCache(
        BATCH, HEADS, SIZE, window, capacity=capacity, num_sink_tokens=sinks, value_size=VALUE_SIZE
    )


def chunk(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + n)
    k = torch.randn(BATCH, n, HEADS, SIZE, generator=generator).transpose(1, 2)
    return k, torch.randn(BATCH, HEADS, n, VALUE_SIZE, generator=generator)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 25)), st.tuples(st.just("append"), st.just(1)),
        st.tuples(st.just("rollback"), st.integers(0, 12)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
        st.tuples(st.just("snapshot"), st.just(0)), st.tuples(st.just("restore"), st.just(0)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 9), st.integers(0, 8), st.integers(0, 3))
def test_any_use_against_a_list(actions: list[tuple], window: int, spare: int, sinks: int) -> None:
    """Whatever the order of calls, the ring holds the sinks and the window, or refuses."""
    cache, tokens = make(window, window + spare, sinks), Tokens(window, sinks)
    longest = 0  # of the tokens whose slots have been written since the last restore
    oldest = sinks  # what a restore brought back begins here
    saved = None
    for number, (action, argument) in enumerate(actions):
        if action == "append":
            k, v = chunk(argument, number)
            cache.append(k, v)
            tokens.append(k, v)
            longest = max(longest, len(tokens))
        elif action == "rollback":
            left = len(tokens) - argument
            lost = max(oldest, longest - cache.capacity)
            if left < 0 or max(sinks, left - window) < lost:
                with pytest.raises(ValueError, match="rollback: num_tokens is"):
                    cache.rollback(argument)
            else:
                cache.rollback(argument)
                tokens.k, tokens.v = tokens.k[:, :, :left], tokens.v[:, :, :left]
        elif action == "reorder":
            rows = torch.tensor(argument)
            cache.reorder_(rows)
            tokens.k, tokens.v = tokens.k[rows], tokens.v[rows]
        elif action == "snapshot":
            saved = (cache.snapshot(), tokens.k, tokens.v)
        elif action == "restore" and saved is not None:
            cache.restore(saved[0])
            _, tokens.k, tokens.v = saved
            longest = len(tokens)
            oldest = max(sinks, longest - window)
        elif action == "reset":
            cache.reset()
            tokens.k, tokens.v = tokens.k[:, :, :0], tokens.v[:, :, :0]
            longest, oldest = 0, sinks
        tokens.check(cache)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 3))
def test_what_a_ring_holds_does_not_depend_on_the_chunks(lengths: list[int], sinks: int) -> None:
    """All slots: what lies in them follows from the number of tokens."""
    total = sum(lengths)
    k, v = chunk(total)
    first, second = make(5, 11, sinks), make(5, 11, sinks)
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    for begin, end in pairwise(ends):
        first.append(k[:, :, begin:end], v[:, :, begin:end])
    for token in range(total):
        second.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
    used = min(total, sinks + 11)
    assert torch.equal(first._keys[:, :, :used], second._keys[:, :, :used])
    assert torch.equal(first._values[:, :, :used], second._values[:, :, :used])
    for position in range(max(sinks, total - 11), total):
        slot = sinks + (position - sinks) % 11
        assert torch.equal(first._keys[:, :, slot], k[:, :, position])


def test_the_slot_is_the_position_modulo_the_capacity() -> None:
    cache = make(4, 7)
    k, v = chunk(40)
    cache.append(k, v)
    for position in range(33, 40):
        assert torch.equal(cache._keys[:, :, position % 7], k[:, :, position])
        assert torch.equal(cache._values[:, :, position % 7], v[:, :, position])


@pytest.mark.parametrize("capacity", [8, 9, 20])
def test_a_chunk_larger_than_the_ring_keeps_its_end(capacity: int) -> None:
    cache, tokens = make(8, capacity), Tokens(8, 0)
    for n in (3, 100, 1, capacity, capacity + 1):
        k, v = chunk(n, n)
        cache.append(k, v)
        tokens.append(k, v)
        tokens.check(cache)


def test_rollback_as_far_as_the_spare_slots_go() -> None:
    k, v = chunk(50)
    for spare in range(6):
        for count in range(8):
            cache = make(8, 8 + spare)
            cache.append(k, v)
            if count > spare:
                with pytest.raises(ValueError, match=f"expected at most {spare}: .* overwritten"):
                    cache.rollback(count)
                assert torch.equal(cache.keys, k[:, :, -8:])
            else:
                cache.rollback(count)
                assert torch.equal(cache.keys, k[:, :, 42 - count : 50 - count])


def test_rollbacks_add_up() -> None:
    """Two rollbacks reach no further than one, unless new tokens have come in between."""
    k, v = chunk(50)
    cache = make(8, 12)
    cache.append(k, v)
    cache.rollback(3)
    with pytest.raises(ValueError, match="expected at most 1"):
        cache.rollback(2)
    cache.append(k[:, :, :2], v[:, :, :2])
    cache.rollback(3)
    assert torch.equal(cache.keys, k[:, :, 38:46])


def test_before_the_ring_is_full_any_rollback_is_exact() -> None:
    k, v = chunk(12)
    for count in range(13):
        cache = make(8, 12)
        cache.append(k, v)
        cache.rollback(count)
        assert torch.equal(cache.keys, k[:, :, max(0, 4 - count) : 12 - count])


def test_a_snapshot_is_a_copy_and_fits_other_capacities() -> None:
    cache, other = make(8, 20, 2), make(8, 8, 2)
    k, v = chunk(33)
    cache.append(k, v)
    saved = cache.snapshot()
    cache.append(*chunk(9))
    assert saved.num_tokens == 33 and torch.equal(saved.keys[:, :, 2:], k[:, :, -8:])
    for ring in (other, cache):
        ring.restore(saved)
        more = chunk(3, 7)
        ring.append(*more)
        assert torch.equal(ring.keys[:, :, 2:], torch.cat([k, more[0]], 2)[:, :, -8:])
        assert torch.equal(ring.keys[:, :, :2], k[:, :, :2])


def test_reorder_copies_rows_that_are_read_twice() -> None:
    for n in (3, 30):
        for rows in ([0, 1, 2], [1, 1, 0], [2, 0, 1], [2, 2, 2]):
            cache = make(8, 11)
            k, v = chunk(n)
            cache.append(k, v)
            cache.reorder_(torch.tensor(rows, dtype=torch.int32))
            assert torch.equal(cache.keys, k[rows][:, :, -8:])
            assert torch.equal(cache.values, v[rows][:, :, -8:])


def test_select_rows_changes_their_number() -> None:
    cache = make(8, 11)
    k, v = chunk(30)
    cache.append(k, v)
    cache.select_rows_(torch.tensor([2, 2, 0, 1, 1]))
    assert torch.equal(cache.keys, k[[2, 2, 0, 1, 1]][:, :, -8:])
    more = torch.ones(5, HEADS, 1, SIZE), torch.ones(5, HEADS, 1, VALUE_SIZE)
    cache.append(*more)
    assert cache.keys.shape[0] == 5 and torch.equal(cache.values[:, :, -1:], more[1])


def test_ordered_gives_as_many_as_are_asked_for() -> None:
    cache, tokens = make(8, 11, 2), Tokens(8, 2)
    for n in (1, 4, 3, 20):
        k, v = chunk(n)
        cache.append(k, v)
        tokens.append(k, v)
        for length in range(12):
            assert torch.equal(cache.ordered(length)[0], tokens.k[:, :, tokens.held(length)])


def test_written_outside_and_inside_of_inference_mode() -> None:
    with torch.inference_mode():
        cache = make(4)
        cache.append(*chunk(3))
    cache.append(*chunk(3))
    cache.reorder_(torch.tensor([0, 0, 1]))
    with torch.inference_mode():
        cache.append(*chunk(1))
    assert cache.num_tokens == 7


def test_defaults() -> None:
    cache = RingKVCache(1, 2, 3, 10)
    assert (cache.capacity, cache.num_sink_tokens, cache.num_tokens) == (73, 0, 0)
    assert cache.keys.shape == (1, 2, 0, 3) and cache.values.dtype == torch.float32
    half = RingKVCache(1, 2, 3, 10, dtype=torch.bfloat16)
    assert half.keys.dtype == torch.bfloat16
    assert "window 10 of 73 slots" in repr(cache)


def attend_to_all(
    q: torch.Tensor, tokens: Tokens, queries: int, padding: torch.Tensor | None, options: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last queries with all keys and a mask, the slow way."""
    total = len(tokens)
    m = torch.arange(total - queries, total)[:, None]
    n = torch.arange(total)
    visible = (n <= m) & ((n > m - tokens.window) | (n < tokens.sinks))
    visible = visible[None, None].expand(BATCH, 1, -1, -1)
    if padding is not None:
        visible = visible & padding[:, None, None]
    slopes = options.pop("alibi_slopes", None)
    bias = torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
    if slopes is not None:
        bias = bias - slopes[:, None, None] * (m - n).abs()
    return reference(
        q.double(), tokens.k.double(), tokens.v.double(), attn_mask=bias, return_lse=True,
        **options,
    )  # fmt: skip


def compare(
    lengths: list[int], window: int, capacity: int, pinned: int, seed: int, **chosen: object
) -> None:
    """A sequence in chunks, each attended to as it comes."""
    generator = torch.Generator().manual_seed(seed)
    cache, tokens = make(window, capacity, pinned), Tokens(window, pinned)
    total = sum(lengths)
    padding = None
    if chosen.pop("padding", False):
        padding = torch.rand(BATCH, total, generator=generator) < 0.7
        padding[1] = torch.arange(total) >= total // 2  # left padding
    for number, n in enumerate(lengths):
        k, v = chunk(n, 77 * seed + number)
        q = torch.randn(BATCH, 2 * HEADS, n, SIZE, generator=generator)
        tokens.append(k, v)
        mask = None if padding is None else padding[:, : len(tokens)]
        want, want_lse = attend_to_all(q, tokens, n, mask, dict(chosen))
        if number % 3 == 2 and cache.fits(n):  # written before
            cache.append(k, v)
            got = cache.attend(q, key_padding_mask=mask, return_lse=True, **chosen)
        else:
            got = cache.attend(q, k, v, key_padding_mask=mask, return_lse=True, **chosen)
        torch.testing.assert_close(got[0].double(), want, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(got[1].double(), want_lse.double(), atol=2e-6, rtol=2e-6)
        tokens.check(cache)


LENGTHS = [
    [1] * 40, [30, *[1] * 20], [3, 1, 1, 4, 2, 1, 9, 1, 1, 1, 17, 1, 40, 1, 1], [5] * 9,
    [200, 1, 1, 100, 1], [1, 0, 2],
]  # fmt: skip
OPTIONS: dict[str, dict] = {
    "plain": {},
    "scale and softcap": dict(scale=0.7, softcap=3.0),
    "sinks": dict(sinks=torch.tensor([0.3, -2.0, 5.0, 0.0])),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.0])),
    "padding": dict(padding=True),
    "all": dict(
        scale=0.4, softcap=9.0, sinks=torch.tensor([1.0, -1.0, 0.0, 2.0]), padding=True,
        alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("pinned", [0, 3])
def test_attention_to_the_ring(lengths: list[int], options: str, pinned: int) -> None:
    for seed, (window, capacity) in enumerate(
        [(8, 8), (8, 11), (1, 1), (13, 40), (1, 4), (500, 500)]
    ):
        compare(lengths, window, capacity, pinned, seed, **OPTIONS[options])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=15),
    st.integers(1, 12), st.integers(0, 10), st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_attention_in_any_chunks(
    lengths: list[int], window: int, spare: int, sinks: int, padding: bool
) -> None:
    compare(lengths, window, window + spare, sinks, 1, padding=padding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    cache = RingKVCache(1, 2, 64, 20, capacity=24, dtype=dtype)
    q, k, v = (torch.randn(1, heads, 70, 64).to(dtype) for heads in (4, 2, 2))
    for begin, end in pairwise([0, 33, 34, 35, 39, 70]):
        out = cache.attend(q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end])
        want = reference(q[:, :, :end], k[:, :, :end], v[:, :, :end], window=20)[:, :, begin:end]
        assert out.dtype == dtype
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


def test_no_window_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step gives the ops views of the ring, one of all of it where all is visible."""
    seen: list[torch.Tensor] = []
    decode = lmdecode.sliding_window_decode

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> object:
        seen.extend((k, v))
        return decode(q, k, v, **options)

    monkeypatch.setattr("lmdecode.attention.ops.sliding_window_decode", watch)
    for capacity, most in ((8, 1), (11, 2)):
        cache = make(8, capacity)
        for number in range(40):
            seen.clear()
            cache.attend(torch.randn(BATCH, 4, 1, SIZE), *chunk(1, number))
            assert len(seen) <= 2 * most
            storages = {cache._keys.data_ptr(), cache._values.data_ptr()}
            assert {tensor.untyped_storage().data_ptr() for tensor in seen} == storages


def test_the_result_depends_on_the_row_alone() -> None:
    """The same sequence in another row, beside other ones: the same bits."""
    choice = random.Random(3)
    lengths = [choice.choice((1, 1, 1, 5, 30)) for _ in range(20)]
    results = []
    for rows in ([0, 1, 2], [2, 1, 0]):
        cache, outs = make(8, 11), []
        for number, n in enumerate(lengths):
            k, v = chunk(n, number)
            q = torch.randn(BATCH, 4, n, SIZE, generator=torch.Generator().manual_seed(number))
            outs.append(cache.attend(q[rows], k[rows], v[rows]))
        results.append(torch.cat(outs, 2)[rows])
    assert torch.equal(*results)


Q, (K, V) = torch.randn(BATCH, 4, 2, SIZE), chunk(2)
CALLS = [
    (r"RingKVCache: window is 0; expected at least 1", lambda c: make(0)),
    (r"RingKVCache: window is of type NoneType", lambda c: RingKVCache(1, 1, 1, None)),
    (r"RingKVCache: capacity is 7; expected at least 8, the window", lambda c: make(8, 7)),
    (r"RingKVCache: num_sink_tokens is -1", lambda c: make(8, 8, -1)),
    (r"RingKVCache: dtype is of type str; expected a torch.dtype",
     lambda c: RingKVCache(1, 1, 1, 1, dtype="float32")),
    (r"restore: snapshot is of type tuple; expected a RingSnapshot",
     lambda c: c.restore((30, K, V))),
    (r"RingKVCache: batch is -2", lambda c: RingKVCache(-2, 1, 1, 1)),
    (r"RingKVCache: k is of type list", lambda c: c.append([1], V)),
    ("v has another dtype than the cache, float16; expected float32",
     lambda c: c.attend(Q, K, V.half())),
    (r"RingKVCache: v requires a gradient", lambda c: c.append(K, V.clone().requires_grad_())),
    (r"k has another dtype", lambda c: c.append(K.half(), V)),
    (r"rollback: num_tokens is -1", lambda c: c.rollback(-1)),
    (r"rollback: num_tokens is 31; expected 0 to 30", lambda c: c.rollback(31)),
    (r"rollback: num_tokens is 4; expected at most 3", lambda c: c.rollback(4)),
    (r"restore: num_tokens is 1099511627777; expected 0 to 2\^40",
     lambda c: c.restore(c.snapshot()._replace(num_tokens=2**40 + 1))),
    (r"rollback: num_tokens is of type Tensor", lambda c: c.rollback(torch.tensor(1))),
    (r"restore: keys of the snapshot are .*\[3, 2, 9, 4\]; expected .*\[3, 2, 8, 4\]",
     lambda c: c.restore(lmdecode.RingSnapshot(30, *(chunk(9))))),
    (r"restore: values of the snapshot are torch.float16",
     lambda c: c.restore(lmdecode.RingSnapshot(30, chunk(8)[0], chunk(8)[1].half()))),
    (r"ordered: length is 12; expected 0 to 11", lambda c: c.ordered(12)),
    (r"rows is of type list", lambda c: c.reorder_([1, 0, 0])),
    (r"attend: q is of type list", lambda c: c.attend([1])),
    (r"attend: v is of type NoneType", lambda c: c.attend(Q, K)),
    (r"attend: q has shape \[4, 2, 4\]", lambda c: c.attend(Q[0], K, V)),
    (r"attend: v has shape \[2, 2, 6\]", lambda c: c.attend(Q, K, V[0])),
    (r"attend: q has 5 tokens; expected at most 4: .* overwritten",
     lambda c: c.attend(torch.randn(BATCH, 4, 5, SIZE))),
    (r"attend: q has 40 tokens; expected at most 32",
     lambda c: c.attend(torch.randn(BATCH, 4, 40, SIZE), K, V)),
    (r"attend: key_padding_mask has shape \[3, 30\]; expected \[3, 32\]",
     lambda c: c.attend(Q, K, V, key_padding_mask=torch.ones(3, 30, dtype=torch.bool))),
]  # fmt: skip


@wrong_calls(CALLS)
def test_wrong_calls_change_nothing(wrong: WrongCall) -> None:
    cache, tokens = make(8, 11), Tokens(8, 0)
    k, v = chunk(30)
    cache.append(k, v)
    tokens.append(k, v)
    assert_refused(wrong, lambda: wrong[1](cache))
    tokens.check(cache)


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn,
]  # fmt: skip


def check(
    rings: list[torch.Tensor],
    states: list[torch.Tensor],
    position: int | torch.Tensor,
    num_sink_tokens: int,
    device: torch.device,
) -> None:
    want = [on_device(tensor, torch.device("cpu")) for tensor in rings]
    got = [on_device(tensor, device) for tensor in rings]
    chunk = [on_device(tensor, device) for tensor in states]
    where = position.to(device) if isinstance(position, torch.Tensor) else position
    append_as_reference(*want, *states, position, num_sink_tokens=num_sink_tokens)
    result = lmdecode.ring_cache_append_(*got, *chunk, where, num_sink_tokens=num_sink_tokens)
    assert result is None
    for one, other in zip(got, want, strict=True):
        assert torch.equal(raw(one).cpu(), raw(other)), (position, num_sink_tokens)


RINGS: dict[str, Callable[[torch.dtype, int], torch.Tensor]] = {
    "[B, H, S, D]": lambda dtype, size: filled((2, 3, 7, size), dtype),
    "[B, S, H, D]": lambda dtype, size: filled((2, 7, 3, size), dtype).transpose(1, 2),
    "[S, B, H, D]": lambda dtype, size: filled((7, 2, 3, size), dtype).permute(1, 2, 0, 3),
    "gaps": lambda dtype, size: filled((4, 4, 9, size + 3), dtype)[::2, 1:, 1:8, 1 : size + 1],
}
STATES: dict[str, Callable[[int, torch.dtype, int], torch.Tensor]] = {
    "[B, H, n, D]": lambda n, dtype, size: filled((2, 3, n, size), dtype, n),
    "[B, n, H, D]": lambda n, dtype, size: filled((2, n, 3, size), dtype, n).transpose(1, 2),
    "[B, H, D, n]": lambda n, dtype, size: filled((2, 3, size, n), dtype, n).mT,
    "one for all heads": lambda n, dtype, size: filled((2, 1, n, size), dtype, n).expand(
        2, 3, n, size
    ),
    "steps": lambda n, dtype, size: filled((2, 3, 2 * n, 2 * size), dtype, n)[:, :, ::2, ::2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("states", STATES)
def test_layouts_and_dtypes(
    states: str, ring: str, dtype: torch.dtype, device: torch.device
) -> None:
    choice = random.Random(f"{states} {ring}")
    for size in (1, 5, 16):
        for tokens in (0, 1, 2, 7, 8, 30):
            rings = [RINGS[ring](dtype, size), RINGS[ring](dtype, 2 * size)]
            chunk = [STATES[states](tokens, dtype, size), STATES[states](tokens, dtype, 2 * size)]
            check(rings, chunk, choice.randrange(40), choice.choice((0, 1, 6)), device)


@pytest.mark.parametrize("num_sink_tokens", [0, 1, 3, 6])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 8, 20])
def test_every_position(tokens: int, num_sink_tokens: int, device: torch.device) -> None:
    for position in (*range(25), 2**31 - 1, 2**40):
        rings = [filled((1, 2, 7, 3), torch.float32), filled((1, 2, 7, 3), torch.float32, 1)]
        chunk = [filled((1, 2, tokens, 3), torch.float32, seed) for seed in (2, 3)]
        check(rings, chunk, position, num_sink_tokens, device)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_position_for_each_row(dtype: torch.dtype, device: torch.device) -> None:
    for seed in range(20):
        choice = random.Random(seed)
        positions = torch.tensor([choice.randrange(30) for _ in range(5)], dtype=dtype)
        where = positions.repeat_interleave(2)[::2] if seed % 2 else positions
        tokens = choice.choice((1, 2, 5, 12))
        rings = [filled((5, 2, 9, 4), torch.bfloat16, i) for i in range(2)]
        chunk = [filled((5, 2, tokens, 4), torch.bfloat16, i) for i in (2, 3)]
        check(rings, chunk, where, choice.choice((0, 2)), device)


@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 5, 0)], ids=["no row", "no head", "no size"]
)
def test_empty(shape: tuple[int, ...], device: torch.device) -> None:
    chunk = [filled((*shape[:2], 3, shape[3]), torch.float32) for _ in range(2)]
    check([filled(shape, torch.float32), filled(shape, torch.float32)], chunk, 4, 1, device)


def test_keys_and_values_side_by_side_in_one_buffer(device: torch.device) -> None:
    buffer = filled((2, 2, 6, 8), torch.float32).to(device)
    want = buffer.clone()
    chunk = filled((2, 2, 9, 8), torch.float32, 1).to(device)
    for run, both in ((lmdecode.ring_cache_append_, buffer), (append_as_reference, want)):
        run(both[..., :4], both[..., 4:], chunk[..., :4], chunk[..., 4:], 3)
    assert torch.equal(buffer, want)


def ring(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (2, 3, 5, 4), dtype=dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (2, 3, 2, 4), dtype=dtype)


SHARED = ring()
WRONG = [
    (r"position is -1; expected 0 to 2\^40", {4: -1}),
    (r"position is \d+; expected 0 to 2\^40", {4: 2**40 + 1}),
    (r"position\[1\] is -3", {4: torch.tensor([0, -3])}),
    (r"keys has strides that make elements overlap", {0: ring(1, 3, 5, 4).expand(2, 3, 5, 4)}),
    (r"values has stride 5 in its last dimension", {1: ring(2, 3, 4, 5).mT}),
    (r"values shares memory with keys", {0: SHARED, 1: SHARED}),
    (r"k shares memory with keys", {0: SHARED, 2: SHARED[:1, :, 1:3].expand(2, 3, 2, 4)}),
    (r"v shares memory with keys", {0: SHARED, 3: SHARED[:, :, 3:]}),
    (r"num_sink_tokens is 5; expected 0 to 4", {"num_sink_tokens": 5}),
]


@wrong_calls(WRONG)
def test_errors_name_the_argument_and_nothing_is_written(wrong: WrongCall) -> None:
    given = (ring(), ring(), tokens(), tokens(), 0)
    assert_op_refuses(lmdecode.ring_cache_append_, wrong, *given)
