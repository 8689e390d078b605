"""Paths and tensors that the store refuses before it opens or reads anything."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from store_cases import cache, fingerprint
from torch._subclasses.fake_tensor import FakeTensorMode

from lmdecode.store import Fingerprint, KVStore

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


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1.0, 2, 3], TypeError, r"tokens\[0\] is of type float; expected token ids"),
        ([5, 9, 2, 2**40], ValueError,
         r"tokens\[3\] is 1099511627776; expected a token id, 0 to 2147483647"),
        (torch.tensor([5, 2**40]), ValueError,
         r"tokens\[1\] is 1099511627776; expected a token id, 0 to"),
        (torch.tensor([[-7]]), ValueError, r"tokens\[0\] is -7; expected a token id, 0 to"),
        ("text", TypeError, "tokens is of type str; expected token ids"),
        (5, TypeError, "tokens is of type int; expected token ids"),
    ],
    ids=["float", "large", "large in a tensor", "negative in a tensor", "text", "number"],
)  # fmt: skip
def test_the_token_that_is_none_is_named(
    tokens: Any, error: type[Exception], message: str, open_store: Any
) -> None:
    store = open_store()
    for call in (store.lookup, lambda tokens: store.put(tokens, cache([1]))):
        with pytest.raises(error, match=message):
            call(tokens)


def test_what_is_no_store_no_model_and_no_server(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^KVStore: path is of type int; expected a path"):
        KVStore(5, fingerprint=fingerprint(), capacity_bytes=1 << 20)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Fingerprint.from_model: model is of type int; expected"):
        Fingerprint.from_model(5)
    with pytest.raises(
        ValueError, match=r"^Remote: url has another scheme, 'http'; expected one of"
    ):
        KVStore(
            tmp_path, fingerprint=fingerprint(), capacity_bytes=1 << 20, remote="http://u:pass@x"
        )


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path, open_store: Any) -> None:
    open_store().put(TOKENS, cache(TOKENS))
    command = [sys.executable, "-m", "lmdecode.store", "stat", str(tmp_path / "store")]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, b"pipe" in done.stderr) == (0, False), done.stderr
