"""The ops of KV caches, and calls of them (tests/support/contracts.py)."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import lmdecode
from lmdecode import reference
from tests.kv_cache.cache_memory import filled
from tests.support.contracts import Call, Contract
from tests.support.random_tensors import randint, randn

OPS = torch.ops.lmdecode
PARENTS = torch.tensor([2, 0, 0])


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- reorder_cache_ -------------------------------------------------------------------------------


def reordered(*shapes: tuple[int, ...], narrow: bool = False, **options: int) -> Call:
    parents = PARENTS.int() if narrow else PARENTS
    return Call(lmdecode.reorder_cache_, [randn(*shape) for shape in shapes], parents, **options)


def large_reorders() -> Iterator[Call]:
    """Caches that are moved in parts, by stores past the caches."""
    maps = [torch.tensor([1, 2, 0, 3, 3, 4]), torch.tensor([5, 5, 2, 1, 3, 0])]
    flat = filled((6 * 1_500_007 + 3,), torch.int8)
    one = filled((6, 2, 700, 128), torch.bfloat16)
    for (tensors, options), parents in zip(
        (
            ([filled((6, 2, 700, 128), torch.bfloat16, i) for i in range(4)], {}),
            ([one], {"length_dim": 2, "length": 333}),
            ([filled((1500, 6, 301), torch.float32)], {"batch_dim": 1}),
            ([flat[3:].view(6, -1)], {}),  # nothing is aligned
            ([filled((900_001, 6), torch.int16)], {"batch_dim": 1}),
            ([filled((5000, 6, 75), torch.int32)[..., 1:]], {"batch_dim": 1}),
        ),
        itertools.cycle(maps),
    ):
        yield Call(lmdecode.reorder_cache_, tensors, parents, **options)
    several = [filled((8, 1 + 5000 * i), torch.float32, i) for i in range(12)]
    yield Call(lmdecode.reorder_cache_, several, torch.tensor([3, 1, 0, 7, 7, 2, 4, 5]))


# --- tables of beams and blocks -------------------------------------------------------------------


def redirected(rows: int, columns: int, parents: Tensor, length: int | Tensor) -> Call:
    table = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    return Call(lmdecode.update_beam_indirection_, table, parents, length)


def large_redirections() -> Iterator[Call]:
    yield redirected(40, 200_001, randint(40, 40), 200_000)
    yield redirected(40, 200_001, torch.randperm(40), torch.arange(40) * 5000)


def appended(position: int | Tensor, rings: tuple[int, int] = (4, 2)) -> Call:
    tensors = [randn(2, 3, n, d) for n in (5, 7) for d in rings]
    return Call(lmdecode.ring_cache_append_, *tensors, position, num_sink_tokens=1)


def large_append() -> Iterator[Call]:
    states = [filled((4, 8, n, 64), torch.bfloat16, i) for n in (300, 420) for i in range(2)]
    yield Call(lmdecode.ring_cache_append_, *states, 77, num_sink_tokens=4)


def large_copies() -> Iterator[Call]:
    pools = [filled((64, 8, 64, 128), torch.bfloat16, i) for i in range(2)]
    for seed in (1, 2, 4):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).int()
        copies = torch.stack((order[40:].repeat(2)[:40], order[:40], randint(65, 40).int()), 1)
        yield Call(lmdecode.copy_blocks_, pools, copies)


def block_table() -> tuple[Tensor, ...]:
    """Two rows of a table of four that share a block, which is not full."""
    table = lmdecode.BlockTable(10, 4, 3, block_size=4)
    table.insert(5, 2)
    return table._table, table._lengths, table.ref_counts, table._free_blocks, table._counters


def of_a_table(op: Callable[..., object], *arguments: object) -> Call:
    return Call(op, *block_table(), *arguments)


CONTRACTS = [
    Contract(
        "reorder_cache_",
        {
            "[B, H, S, D]": lambda: reordered((3, 2, 5, 4), (3, 2, 5, 4)),
            "int32": lambda: reordered((3, 2, 5, 4), (3, 2, 5, 4), narrow=True),
            "a length": lambda: reordered((3, 2, 5, 4), (3, 1, 6, 2), length_dim=2, length=3),
            "[S, B, D]": lambda: reordered((5, 3, 4), batch_dim=1, length_dim=0, length=5),
            "none": lambda: reordered(),
        },
        strided=("parents", 0, 1),
        many=large_reorders,
        reference=reference.reorder_cache_,
    ),
    Contract(
        "update_beam_indirection_",
        {
            "a length": lambda: redirected(3, 4, PARENTS, 2),
            "lengths": lambda: redirected(3, 4, PARENTS, integers(0, 2, 4)),
        },
        strided=(1, 2),
        many=large_redirections,
        reference=reference.update_beam_indirection_,
    ),
    Contract(
        "ring_cache_append_",
        {"a position": lambda: appended(9), "positions": lambda: appended(integers(0, 6))},
        strided=(2, 3, 4), many=large_append, reference=reference.ring_cache_append_,
    ),
    Contract(
        "copy_blocks_",
        {
            "two pools": lambda: Call(
                lmdecode.copy_blocks_, [randn(4, 2, 5, 3), randn(4, 1, 5, 2)],
                torch.tensor([[0, 1, 5], [2, 3, 1]], dtype=torch.int32),
            ),
        },
        many=large_copies,
        reference=reference.copy_blocks_,
    ),
    Contract(
        "block_table_append_",
        {
            "rows that share": lambda: of_a_table(
                OPS.block_table_append_, torch.empty(4, 3).int(), torch.tensor([1, 5, 0, 0]), 4,
            ),
        },
        compiles=False,
    ),
    Contract(
        "block_table_reorder_",
        {
            "rows that share": lambda: of_a_table(
                OPS.block_table_reorder_, torch.tensor([1, 1, 0]), 2, 4,
            ),
        },
        compiles=False,
    ),
]  # fmt: skip
