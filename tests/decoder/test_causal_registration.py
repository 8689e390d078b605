"""The ops of decoder-only models are registered as torch wants it."""

from typing import Any

import torch
from torch.library import opcheck

from lmdecode.decoder.causal_caches import CausalCaches
from tests.decoder.causal_steps import Entry, packed, step
from tests.support.causal_models import random_tokens

ops = torch.ops.lmdecode


def running(**options: Any) -> CausalCaches:
    """Caches of three sequences, of which two share a prompt."""
    caches = CausalCaches(packed("gemma3_text", "plain"), 3, 96, max_rows=8, **options)
    # Nothing that was never written: opcheck compares all that an op may write.
    for pool in caches._tensors[::6]:
        pool.zero_()
    caches._workspace.zero_()
    step(caches, Entry(0, random_tokens(40)), Entry(2, random_tokens(3, 1), False))
    caches.reorder(torch.tensor([0, 0, 2]))
    return caches


def test_causal_workspace_bytes() -> None:
    caches = running()
    model = caches.model
    sizes = [8, 3, 3]
    opcheck(ops.causal_workspace_bytes.default, (model.memory, sizes))
    found = ops.causal_workspace_bytes(model.memory, sizes)
    assert found == caches._workspace.numel()
    for i in range(3):
        more = [size + 64 * (i == j) for j, size in enumerate(sizes)]
        assert ops.causal_workspace_bytes(model.memory, more) > found


def test_what_is_returned_is_none_of_the_arguments() -> None:
    caches = running()
    first = step(caches, Entry(1, random_tokens(5)))[0]
    before = first.clone()
    second = step(caches, Entry(1, random_tokens(5)))[0]
    assert first.equal(before) and not second.equal(before)
