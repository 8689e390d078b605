"""The ops of KV caches in graphs of torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lmdecode

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def caches(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.slow
def test_compile_reorder_cache() -> None:
    """In place through functionalisation, around it what a step computes."""

    def step(keys: torch.Tensor, values: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        keys.add_(1.0)
        lmdecode.reorder_cache_([keys, values], parents, length_dim=2, length=3)
        return keys.sum() + values[0].sum()

    compiled = torch.compile(step, fullgraph=True)
    for parents in (torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])):
        got, want = caches([(3, 2, 5, 4), (3, 2, 5, 4)]), caches([(3, 2, 5, 4), (3, 2, 5, 4)])
        torch.testing.assert_close(compiled(*got, parents), step(*want, parents))
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


def test_compile_update_beam_indirection() -> None:
    """A step whose lengths are a tensor, so that it is compiled once."""

    def step(table: torch.Tensor, parents: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        lengths.add_(1)
        lmdecode.update_beam_indirection_(table, parents, lengths)
        return table.sum()

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    got, want = (
        (torch.arange(60, dtype=torch.int32).view(3, 20), torch.tensor([2, 4, 4])) for _ in range(2)
    )
    for parents in (torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2])):
        assert compiled(got[0], parents, got[1]) == step(want[0], parents, want[1])
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert counter.frame_count == 1


def test_compile_ring_cache_append() -> None:
    """A step whose positions are a tensor, so that it is compiled once."""

    def step(
        keys: torch.Tensor, values: torch.Tensor, chunk: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        lmdecode.ring_cache_append_(
            keys, values, chunk * 2.0, chunk[..., :2], positions, num_sink_tokens=1
        )
        positions.add_(1)
        return keys.sum() + values[0].sum()

    counter = CompileCounterWithBackend("inductor")
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
