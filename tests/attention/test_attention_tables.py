"""Attention through a block table and a beam index: the bits of the gathered cache."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import reference, sliding_window_attention, sliding_window_decode
from tests.attention.attention_cases import DTYPES, AttentionCase, Paged, assert_accurate, normal

OPS = {"attention": sliding_window_attention, "decode": sliding_window_decode}
NAN = float("nan")


def beams(rows: int, keys: int, seed: int = 5) -> torch.Tensor:
    """An index as random beam steps leave it."""
    index = lmdecode.BeamIndirection(rows, keys)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(keys):
        index.advance()
        index.reorder_(torch.randint(0, rows, (rows,), generator=generator))
    return index.table


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16, 64, 100, 256])
def test_blocks_give_the_bits_of_the_gathered_cache(
    op: str, dtype: torch.dtype, block_size: int
) -> None:
    for size in (32, 33, 128):
        paged = Paged([700, 1, 0, 130, 513], block_size=block_size, size=size, dtype=dtype)
        k, v = paged.gathered()
        for queries, options in (
            (1, {}),
            (3, {"window": 90}),
            (9, {"window": 1, "sinks": normal(6)}),
            (70, {"window": 300, "window_right": 5, "softcap": 3.0}),
            (2, {"alibi_slopes": normal(6).abs(), "q_positions": torch.tensor([0, 200])}),
        ):
            q = normal(5, 6, queries, size, seed=3, dtype=dtype)
            options = {**options, "return_lse": True}
            want = OPS[op](q, k, v, kv_lengths=paged.lengths, **options)
            same(OPS[op](q, paged.k, paged.v, **paged.options(), **options), want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_beam_index_gives_the_bits_of_the_gathered_cache(op: str, dtype: torch.dtype) -> None:
    rows, keys = 5, 600
    table = beams(rows, keys)
    lengths = torch.tensor([600, 599, 0, 64, 1])
    for size in (32, 20):
        k = normal(rows, 2, keys, size, seed=1, dtype=dtype)
        v = normal(rows, 2, keys, 48, seed=2, dtype=dtype)
        gathered = [lmdecode.gather_indirect(x, table) for x in (k, v)]
        for queries in (1, 2, 40):
            q = normal(rows, 8, queries, size, seed=3, dtype=dtype)
            for options in ({}, {"window": 70}, {"kv_lengths": lengths, "window": 200}):
                want = OPS[op](q, *gathered, return_lse=True, **options)
                same(OPS[op](q, k, v, indirection=table, return_lse=True, **options), want)


@pytest.mark.parametrize("op", OPS)
def test_against_the_reference(op: str, device: torch.device) -> None:
    """Its own lookup, with rows of queries that are not those of the cache."""
    for dtype in DTYPES:
        for number, (table, options) in enumerate(
            (
                ("block_table", {"window": 40}),
                ("block_table", {"window": None, "sinks": normal(4), "scale": -0.3}),
                ("indirection", {"window": 40, "softcap": 4.0}),
                ("indirection", {"window_right": None}),
            )
        ):
            paged = Paged([200, 77, 5], block_size=32, dtype=dtype, value_size=24)
            k, v, tables = paged.k, paged.v, {"block_table": paged.table}
            if table == "indirection":
                k, v = (x.nan_to_num() for x in paged.gathered())
                tables = {"indirection": beams(3, k.shape[2])}
            if table == "indirection":
                in_order = [lmdecode.gather_indirect(x, tables[table]) for x in (k, v)]
            else:
                in_order = paged.gathered()
            q = normal(3, 4, 2, 32, seed=number, dtype=dtype)
            options = {**options, "kv_lengths": paged.lengths}
            exact = AttentionCase(table, q, k, v, {**options, **tables})
            # What lies behind a length is NaN, which plain torch would read.
            plain = AttentionCase(table, q, *(x.nan_to_num() for x in in_order), options)
            got = exact.to(device).call(OPS[op], return_lse=True)
            assert_accurate(got, plain)
            torch.testing.assert_close(exact.exact()[0], plain.exact()[0])


@pytest.mark.parametrize("op", OPS)
def test_entries_that_nobody_sees_are_not_read(op: str) -> None:
    """Blocks behind a length, or in front of every window, may be free: anything is in them."""
    paged = Paged([300, 10])
    k, v = paged.gathered()
    q = normal(2, 4, 3, 32, seed=3)
    want = OPS[op](q, k, v, window=70, kv_lengths=paged.lengths)
    table = paged.table.clone()
    table[0, :3] = -1  # keys below 300 - 3 - 70 + 1
    table[1, 1:] = 2**31 - 1
    for blocks in (0, 1, 2):
        assert not (table[0] == paged.table[0, blocks]).any()
        for pool in (paged.k, paged.v):
            pool[paged.table[0, blocks]] = NAN
    got = OPS[op](q, paged.k, paged.v, window=70, kv_lengths=paged.lengths, block_table=table)
    assert torch.equal(got, want)
    index = beams(2, k.shape[2])
    want = OPS[op](
        q, *(lmdecode.gather_indirect(x, index) for x in (k, v)), window=70,
        kv_lengths=paged.lengths,
    )  # fmt: skip
    index[0, : 300 - 72] = -7
    index[0, 300:] = index[1, 10:] = 99
    got = OPS[op](q, k, v, window=70, kv_lengths=paged.lengths, indirection=index)
    assert torch.equal(got, want)


def test_views_and_shared_blocks_of_a_block_table() -> None:
    """As a beam search has them: the prompt's blocks are those of all beams."""
    table = lmdecode.BlockTable(num_blocks=30, max_rows=8, max_blocks_per_row=6, block_size=16)
    table.insert(length=40, num_beams=3)
    table.insert(length=21)
    k, v = normal(30, 2, 16, 32, seed=1), normal(30, 2, 16, 32, seed=2)
    for seed in range(12):
        slots = table.append()
        lmdecode.copy_blocks_([k, v], slots.copies)
        for pool, states in ((k, normal(4, 1, 2, 32, seed=seed)), (v, normal(4, 1, 2, 32, seed=9))):
            pool[slots.blocks, :, slots.offsets] = states
        q = normal(4, 4, 1, 32, seed=seed)
        options: dict[str, Any] = {"window": 30, "kv_lengths": table.lengths, "return_lse": True}
        want = sliding_window_decode(q, table.gather(k), table.gather(v), **options)
        same(sliding_window_decode(q, k, v, block_table=table.table, **options), want)
        table.reorder_(torch.tensor([(seed + 1) % 3, 0, seed % 3, 3]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_paged_cache_is_prefilled_in_chunks(dtype: torch.dtype) -> None:
    """Chunk by chunk, written and then attended to: the bits of the whole prompt."""
    length, window = 500, 150
    q, k, v = (normal(1, h, length, 64, seed=h, dtype=dtype) for h in (8, 2, 4))
    v = v[:, :2]
    want, want_lse = sliding_window_attention(q, k, v, window=window, return_lse=True)
    table = lmdecode.BlockTable(num_blocks=20, max_rows=2, max_blocks_per_row=10)
    table.insert(length=0)
    pools = [torch.full((20, 2, 64, 64), NAN, dtype=dtype) for _ in "kv"]
    begin = 0
    for chunk in (1, 63, 64, 100, 7, 265):
        part = slice(begin, begin + chunk)
        slots = table.append(chunk)
        for pool, states in zip(pools, (k, v), strict=True):
            pool[slots.blocks[0], :, slots.offsets[0]] = states[0, :, part].transpose(0, 1)
        out, lse = sliding_window_attention(
            q[:, :, part], *pools, window=window, block_table=table.table,
            kv_lengths=table.lengths, return_lse=True,
        )  # fmt: skip
        assert torch.equal(out, want[:, :, part]) and torch.equal(lse, want_lse[:, :, part])
        begin += chunk
    assert begin == length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_queries_of_a_paged_cache(dtype: torch.dtype) -> None:
    """A batch of chunks: sequences with as many new tokens as each has."""
    paged = Paged([200, 5, 90, 33], dtype=dtype)
    queries = [40, 5, 1, 0]
    q = normal(sum(queries), 4, 32, seed=3, dtype=dtype)
    ends = torch.tensor([0, *queries]).cumsum(0)
    got, got_lse = sliding_window_attention(
        q, paged.k, paged.v, window=50, cu_seqlens_q=ends, return_lse=True, **paged.options()
    )
    assert got.shape == q.shape
    want = reference.sliding_window_attention(
        q.double(), paged.k.double(), paged.v.double(), window=50, cu_seqlens_q=ends,
        **paged.options(),
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=0)
    for row, (begin, end) in enumerate(pairwise(ends.tolist())):
        alone = q[begin:end].transpose(0, 1)[None]
        table, lengths = paged.table[row : row + 1], paged.lengths[row : row + 1]
        out, lse = sliding_window_attention(
            alone, paged.k, paged.v, window=50, block_table=table, kv_lengths=lengths,
            return_lse=True,
        )  # fmt: skip
        assert torch.equal(got[begin:end].transpose(0, 1), out[0])
        assert torch.equal(got_lse[:, begin:end], lse[0])


def test_a_ring_of_blocks() -> None:
    """A table may name a block again: a window's blocks, used in turn, hold any length."""
    window, block_size, blocks, length = 100, 16, 8, 400
    k, v = normal(1, 2, length, 32, seed=1), normal(1, 2, length, 32, seed=2)
    pools = [torch.full((blocks, 2, block_size, 32), NAN) for _ in "kv"]
    table = (torch.arange(length // block_size) % blocks).int()[None]
    for at in range(length):
        for pool, states in zip(pools, (k, v), strict=True):
            pool[table[0, at // block_size], :, at % block_size] = states[0, :, at]
        q = normal(1, 4, 1, 32, seed=at)
        lengths = torch.tensor([at + 1])
        got = sliding_window_decode(q, *pools, window=window, block_table=table, kv_lengths=lengths)
        want = sliding_window_decode(q, k[:, :, : at + 1], v[:, :, : at + 1], window=window)
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["block_table", "indirection"])
def test_masks_and_padding_are_of_the_sequence(name: str) -> None:
    """They speak of positions, wherever these lie."""
    paged = Paged([128, 90], block_size=32)
    k, v, table = paged.k, paged.v, paged.table[:, :4]
    in_order = [x[:, :, :128] for x in paged.gathered()]
    if name == "indirection":
        table = beams(2, 128)
        k, v = in_order
        in_order = [lmdecode.gather_indirect(x, table) for x in in_order]
    q = normal(2, 4, 6, 32, seed=3)
    generator = torch.Generator().manual_seed(0)
    padding = torch.rand(2, 128, generator=generator) < 0.7
    mask = torch.rand(2, 1, 6, 128, generator=generator) < 0.3
    lengths = {"kv_lengths": paged.lengths}
    for op, options in (
        (sliding_window_decode, {"key_padding_mask": padding, "window": 60}),
        (sliding_window_attention, {"key_padding_mask": padding, "window": 60}),
        (sliding_window_attention, {"attn_mask": mask}),
    ):
        want = op(q, *in_order, **lengths, **options)
        assert torch.equal(op(q, k, v, **{name: table}, **lengths, **options), want)


def test_no_keys() -> None:
    table = torch.empty(2, 0, dtype=torch.int32)
    q, k = normal(2, 4, 1, 32), normal(3, 2, 16, 32)
    for op in OPS.values():
        out, lse = op(q, k, k, block_table=table, return_lse=True)
        assert not out.any() and lse.isneginf().all()
        out, lse = op(q, k[:, :, :0], k[:, :, :0], indirection=table, return_lse=True)
        assert not out.any() and lse.isneginf().all()
