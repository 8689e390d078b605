"""Paths and tensors that the store refuses before it opens or reads anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from store_cases import cache
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = list(range(20))


def without_memory() -> Any:
    kv = cache(TOKENS)
    kv[1][0].untyped_storage().resize_(0)
    return kv


def fake() -> Any:
    with FakeTensorMode():
        return [tuple(torch.zeros(plane.shape) for plane in pair) for pair in cache(TOKENS)]


@pytest.mark.parametrize("make", [without_memory, fake])
def test_tensors_without_memory(make: Any, open_store: Any) -> None:
    store = open_store()
    with pytest.raises(ValueError, match="have no memory"):
        store.put(TOKENS, make())
    store.put(TOKENS, cache(TOKENS))
    hit = store.lookup(TOKENS)
    with pytest.raises(ValueError, match="have no memory"):
        store.load(hit, out=make())
    assert not store.verify().damage


def test_a_number_is_no_path(open_store: Any, tmp_path: Path) -> None:
    """It would be an open file's, and closed."""
    store = open_store()
    number = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT)
    try:
        for call in (store.import_, store.export, store.backup):
            with pytest.raises(TypeError, match="is of type int; expected a path"):
                call(number)
        assert os.fstat(number).st_size == 0
    finally:
        os.close(number)


def test_a_path_with_a_null_byte(open_store: Any, tmp_path: Path) -> None:
    store = open_store()
    for call in (store.import_, store.export, store.backup):
        with pytest.raises(ValueError, match="without a null byte"):
            call(f"{tmp_path}/out\0more")
    assert not (tmp_path / "out").exists()
