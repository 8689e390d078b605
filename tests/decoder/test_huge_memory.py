"""The memory of weights and of searches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lmdecode import _huge_memory
from lmdecode._huge_memory import SpareMemory, gather, new_memory


@pytest.mark.parametrize("size", [0, 1, 100, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_has_its_size_and_alignment_and_can_be_written(size: int) -> None:
    memory = new_memory(size)
    assert memory.dtype == torch.uint8
    assert memory.shape == (size,)
    assert memory.data_ptr() % (64 if size < 2 << 20 else 2 << 20) == 0
    assert int(memory.fill_(3).sum()) == 3 * size


def test_memory_made_under_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        memory = new_memory(3 << 20)
    assert int(memory.add_(1)[0]) == 1


def test_gathered_tensors_hold_what_they_held_in_one_memory() -> None:
    before = [
        torch.randn(3, 5),
        torch.empty(0),
        torch.arange(7, dtype=torch.uint8),
        torch.empty(0, dtype=torch.uint8),
        torch.randn(600_000),
        torch.randn(2),
    ]
    after = list(before)
    gather(after)
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        assert torch.equal(old, new)
    filled = [tensor for tensor in after if tensor.numel()]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in filled)
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) == 1
    assert all(a.data_ptr() + a.nbytes <= b.data_ptr() for a, b in pairwise(filled))


def test_spare_memory_is_handed_out_again_but_to_one_at_a_time() -> None:
    spare = SpareMemory()
    first = spare.take(3 << 20)
    assert spare.take(3 << 20).data_ptr() != first.data_ptr()
    spare.give(first)
    assert spare.take(1 << 20).data_ptr() == first.data_ptr()
    spare.give(first)
    assert len(spare.take(4 << 20)) >= 4 << 20


def test_spare_memory_keeps_no_memory_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_huge_memory, "_LARGEST_KEPT", 1000)
    spare = SpareMemory()
    large, small = spare.take(1001), spare.take(1000)
    spare.give(large)
    assert spare.take(1).data_ptr() != large.data_ptr()
    spare.give(small)
    assert spare.take(1).data_ptr() == small.data_ptr()
