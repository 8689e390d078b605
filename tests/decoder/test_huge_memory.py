"""The memory of weights and of searches."""

import copy
import io
import mmap
import pickle
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import lmdecode
from lmdecode import BeamRequest
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.models import huge_memory
from lmdecode.models.huge_memory import SpareMemory, gather, new_memory
from lmdecode.models.packed_causal import PackedCausalModel
from tests.decoder.causal_steps import parts
from tests.decoder.random_decoder import random_decoder


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


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages as on Linux")
def test_memory_where_the_kernel_has_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    # An advice that no kernel knows is refused as this one is by a kernel without huge pages.
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    memory = new_memory(3 << 20)
    assert int(memory.fill_(3)[-1]) == 3


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


def test_spare_memory_keeps_the_larger_one() -> None:
    spare = SpareMemory()
    small, large = spare.take(1000), spare.take(2000)
    spare.give(large)
    spare.give(small)
    assert spare.take(1).data_ptr() == large.data_ptr()


def test_spare_memory_keeps_no_memory_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_memory, "_LARGEST_KEPT", 1000)
    spare = SpareMemory()
    large, small = spare.take(1001), spare.take(1000)
    spare.give(large)
    assert spare.take(1).data_ptr() != large.data_ptr()
    spare.give(small)
    assert spare.take(1).data_ptr() == small.data_ptr()


def test_scratch_of_a_decoder_only_model_is_that_of_the_call_before() -> None:
    model = PackedCausalModel(*parts("llama", "plain"))

    def scratch() -> int:
        return CausalCaches(model, 1, 64, max_rows=1024)._workspace.data_ptr()

    first, kept = scratch(), CausalCaches(model, 1, 64, max_rows=1024)
    assert kept._workspace.data_ptr() == first  # in use: the next one has memory of its own
    assert scratch() != first
    size = model.memory.nbytes
    assert len(pickle.dumps(model)) < size + 100_000 < size + kept._workspace.nbytes


def _saved(decoding: lmdecode.Decoding) -> lmdecode.Decoding:
    file = io.BytesIO()
    torch.save(decoding, file)
    file.seek(0)
    copied: lmdecode.Decoding = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), _saved]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_copies_of_a_decoding(dtype: str, copy_of: Callable[[object], lmdecode.Decoding]) -> None:
    decoding = lmdecode.Decoding(*random_decoder("post_norm"), dtype=dtype)
    request, memory = BeamRequest([1], num_beams=2, max_new_tokens=9), torch.randn(5, 18)

    def result(of: lmdecode.Decoding) -> lmdecode.BeamResult:
        batch = of.batch(max_requests=1, num_beams=2, capacity=10, source=5)
        batch.add(request, memory)
        (only,) = batch.run()
        return only

    copied, expected = copy_of(decoding), result(decoding)
    for tensor in decoding.decoder.of_model:
        tensor.zero_()
    got = result(copied)
    assert got.sequences.equal(expected.sequences) and got.scores.equal(expected.scores)
    stored = {t.untyped_storage().data_ptr() for t in copied.decoder.of_model if t.numel()}
    assert len(stored) == 2  # the embedding, and all others


def test_a_pickled_decoding_takes_little_more_than_its_weights() -> None:
    decoding = lmdecode.Decoding(*random_decoder("post_norm", vocab=3000))
    decoding.decoder.spare_memory.give(torch.empty(32 << 20, dtype=torch.uint8))
    size = sum(tensor.nbytes for tensor in decoding.decoder.of_model)
    assert len(pickle.dumps(decoding)) < size + 100_000
