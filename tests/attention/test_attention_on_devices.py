"""What holds on every device: which keys are seen, and what a result does not depend on."""

from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import sliding_window_attention, sliding_window_decode
from tests.attention import attention_cases
from tests.attention.attention_cases import DTYPES
from tests.support.op_contract import assert_same_bits

OPS = {"attention": sliding_window_attention, "decode": sliding_window_decode}


def qkv(
    queries: int, keys: int, dtype: torch.dtype, device: torch.device, **options: int
) -> list[torch.Tensor]:
    sizes = {"batch": 3, "heads": 6, "size": 64, **options}
    return [x.to(device) for x in attention_cases.qkv(queries, keys, dtype=dtype, **sizes)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_keys_that_are_seen(op: str, dtype: torch.dtype, device: torch.device) -> None:
    def look(queries: int, keys: int, **options: Any) -> list[list[int]]:
        q, k = (torch.zeros(1, 1, n, 16, dtype=dtype, device=device) for n in (queries, keys))
        v = torch.eye(keys, dtype=dtype, device=device)[None, None]
        return [row.nonzero().flatten().tolist() for row in OPS[op](q, k, v, **options)[0, 0]]

    # A window counts the query itself.
    assert look(5, 5, window=3) == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert look(3, 3, window=1) == [[0], [1], [2]]
    assert look(3, 3) == [[0], [0, 1], [0, 1, 2]]
    assert look(4, 4, window=2, window_right=1) == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
    assert look(3, 3, window=1, window_right=None) == [[0, 1, 2], [1, 2], [2]]
    assert look(2, 3, window_right=None) == [[0, 1, 2], [0, 1, 2]]
    # The last query stands beside the last key.
    assert look(2, 5, window=3) == [[1, 2, 3], [2, 3, 4]]
    assert look(5, 2) == [[], [], [], [0], [0, 1]]
    lengths = torch.tensor([3], device=device)
    assert look(2, 5, kv_lengths=lengths) == [[0, 1], [0, 1, 2]]
    assert look(2, 5, window=2, kv_lengths=lengths) == [[0, 1], [1, 2]]
    assert look(2, 5, kv_lengths=0 * lengths) == [[], []]
    # Positions are those of keys.
    positions = torch.tensor([4, 0, 7, -1], device=device)
    assert look(4, 6, window=2, q_positions=positions) == [[3, 4], [0], [], []]
    assert look(4, 6, window=3, q_positions=positions[None]) == [[2, 3, 4], [0], [5], []]
    assert look(1, 3, window=1, window_right=1, q_positions=positions[3:]) == [[0]]
    padding = torch.tensor([[False, True, True, False, True]], device=device)
    assert look(5, 5, window=2, key_padding_mask=padding) == [[], [1], [1, 2], [2], [4]]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_sequence_as_if_alone(op: str, dtype: torch.dtype, device: torch.device) -> None:
    for queries, size in ((1, 128), (7, 64), (150, 80), (3, 256), (2, 300)):
        q, k, v = qkv(queries, 700, dtype, device, size=size)
        options = {"window": 300, "return_lse": True}
        whole = OPS[op](q, k, v, **options)
        for row in range(len(q)):
            alone = OPS[op](*(x[row : row + 1] for x in (q, k, v)), **options)
            assert_same_bits([x[0] for x in alone], [x[row] for x in whole])
        assert_same_bits(OPS[op](q, k, v, **options), whole)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables(op: str, dtype: torch.dtype, device: torch.device) -> None:
    q, k, v = qkv(5, 200, dtype, device)
    want = OPS[op](q, k, v, window=130, return_lse=True)
    order = torch.randperm(3 * 40, generator=torch.Generator().manual_seed(4)).to(device)
    pools = []
    for x in (k, v):
        blocks = x.unflatten(2, (40, 5)).transpose(1, 2).flatten(0, 1)  # [3 * 40, heads, 5, size]
        pool = torch.empty_like(blocks)
        pool[order] = blocks
        pools.append(pool)
    table = order.view(3, 40).int()
    assert_same_bits(OPS[op](q, *pools, window=130, block_table=table, return_lse=True), want)
    rows = torch.arange(3, device=device).int()[:, None].expand(3, 200).contiguous()
    assert_same_bits(OPS[op](q, k, v, window=130, indirection=rows, return_lse=True), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_that_nobody_sees(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v = qkv(3, 400, dtype, device, batch=1)
    for op in OPS.values():
        want = op(q, k, v, window=100, kv_lengths=torch.tensor([350], device=device))
        spoiled = [x.clone() for x in (k, v)]
        for x in spoiled:
            x[:, :, :248] = x[:, :, 350:] = torch.nan
        got = op(q, *spoiled, window=100, kv_lengths=torch.tensor([350], device=device))
        assert torch.equal(got, want)
        spoiled[0][:, :, 348] = torch.nan
        assert (
            op(q, *spoiled, window=1, kv_lengths=torch.tensor([350], device=device)).isnan().any()
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_capture_every_op() -> None:
    device = torch.device("cuda")
    q, k, v = qkv(2, 600, torch.bfloat16, device)
    lengths = torch.tensor([600, 30, 0], device=device)

    def step() -> tuple[torch.Tensor, ...]:
        one = sliding_window_decode(q, k, v, window=300, kv_lengths=lengths, return_lse=True)
        two = sliding_window_attention(q, k, v, window=300, kv_lengths=lengths, return_lse=True)
        return (*one, *two, *lmdecode.merge_attention_states(*one, *two))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    lengths.copy_(torch.tensor([10, 600, 450]))
    graph.replay()
    assert_same_bits(captured, step())
