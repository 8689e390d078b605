"""The ops of KV caches as torch wants them: opcheck, torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import lmdecode
import lmdecode.reference

pytestmark = pytest.mark.usefixtures("fresh_compiler")


CACHES = {
    "[B, H, S, D]": ([(3, 2, 5, 4), (3, 2, 5, 4)], {"batch_dim": 0}),
    "a length": ([(3, 2, 5, 4), (3, 1, 6, 2)], {"batch_dim": 0, "length_dim": 2, "length": 3}),
    "[S, B, D]": ([(5, 3, 4)], {"batch_dim": 1, "length_dim": 0, "length": 5}),
    "none": ([], {"batch_dim": 0}),
}


def caches(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_opcheck_reorder_cache(layout: str, dtype: torch.dtype) -> None:
    shapes, options = CACHES[layout]
    arguments = {"length_dim": None, "length": None, **options}
    parents = torch.tensor([2, 0, 0], dtype=dtype)
    op = torch.ops.lmdecode.reorder_cache_.default
    opcheck(op, (caches(shapes), parents), arguments)
    got, want = caches(shapes), caches(shapes)
    assert op(got, parents, **arguments) is None
    lmdecode.reference.reorder_cache_(want, parents, **options)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lengths", [None, torch.tensor([0, 2, 4], dtype=torch.int32)])
def test_opcheck_update_beam_indirection(lengths: torch.Tensor | None) -> None:
    op = torch.ops.lmdecode.update_beam_indirection_.default
    opcheck(
        op, (torch.arange(12, dtype=torch.int32).view(3, 4), torch.tensor([2, 0, 0]), 2, lengths)
    )


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 6], dtype=torch.int32)])
def test_opcheck_ring_cache_append(rows: torch.Tensor | None) -> None:
    rings = caches([(2, 3, 5, 4), (2, 3, 5, 2)])
    chunk = caches([(2, 3, 7, 4), (2, 3, 7, 2)])
    opcheck(torch.ops.lmdecode.ring_cache_append_.default, (*rings, *chunk, 9, rows, 1))


def test_opcheck_copy_blocks() -> None:
    copies = torch.tensor([[0, 1, 5], [2, 3, 1]], dtype=torch.int32)
    opcheck(torch.ops.lmdecode.copy_blocks_.default, (caches([(4, 2, 5, 3), (4, 1, 5, 2)]), copies))


def block_table() -> tuple[torch.Tensor, ...]:
    """Two rows of a table of four that share a block, which is not full."""
    table = lmdecode.BlockTable(10, 4, 3, block_size=4)
    table.insert(5, 2)
    return table._table, table._lengths, table.ref_counts, table._free_blocks, table._counters


def test_opcheck_block_table() -> None:
    copies, tokens = torch.empty(4, 3, dtype=torch.int32), torch.tensor([1, 5, 0, 0])
    opcheck(torch.ops.lmdecode.block_table_append_.default, (*block_table(), copies, tokens, 4))
    parents = torch.tensor([1, 1, 0])
    opcheck(torch.ops.lmdecode.block_table_reorder_.default, (*block_table(), parents, 2, 4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.slow
def test_compile_reorder_cache(backend: str) -> None:
    """In place through functionalisation, around it what a step computes."""

    def step(keys: torch.Tensor, values: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        keys.add_(1.0)
        lmdecode.reorder_cache_([keys, values], parents, length_dim=2, length=3)
        return keys.sum() + values[0].sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for parents in (torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])):
        got, want = caches([(3, 2, 5, 4), (3, 2, 5, 4)]), caches([(3, 2, 5, 4), (3, 2, 5, 4)])
        torch.testing.assert_close(compiled(*got, parents), step(*want, parents))
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_update_beam_indirection(backend: str) -> None:
    """A step whose lengths are a tensor, so that it is compiled once."""

    def step(table: torch.Tensor, parents: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        lengths.add_(1)
        lmdecode.update_beam_indirection_(table, parents, lengths)
        return table.sum()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    got, want = (
        (torch.arange(60, dtype=torch.int32).view(3, 20), torch.tensor([2, 4, 4])) for _ in range(2)
    )
    for parents in (torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])):
        assert compiled(got[0], parents, got[1]) == step(want[0], parents, want[1])
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_ring_cache_append(backend: str) -> None:
    """A step whose positions are a tensor, so that it is compiled once."""

    def step(
        keys: torch.Tensor, values: torch.Tensor, chunk: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        lmdecode.ring_cache_append_(
            keys, values, chunk * 2.0, chunk[..., :2], positions, num_sink_tokens=1
        )
        positions.add_(1)
        return keys.sum() + values[0].sum()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    got, want = ((*caches([(2, 3, 5, 4), (2, 3, 5, 2)]), torch.tensor([0, 3])) for _ in range(2))
    for _ in range(12):
        (chunk,) = caches([(2, 3, 1, 4)])
        one = compiled(got[0], got[1], chunk, got[2])
        torch.testing.assert_close(one, step(want[0], want[1], chunk, want[2]))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count == 1


def test_compile_reorder_cache_with_a_growing_length() -> None:
    """A length that changes from step to step is compiled once more, then never again."""

    def step(cache: torch.Tensor, parents: torch.Tensor, length: int) -> None:
        lmdecode.reorder_cache_([cache], parents, length_dim=1, length=length)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    parents = torch.tensor([1, 2, 0])
    for length in range(2, 12):
        got, want = caches([(3, 40)]), caches([(3, 40)])
        compiled(*got, parents, length)
        step(*want, parents, length)
        assert torch.equal(got[0], want[0])
    assert counter.frame_count <= 2
