"""A file system that is full, mounted for the test where this user may do so."""

import errno
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmdecode.store import Fingerprint, KVStore

_MIB = 1 << 20
_TOKENS = 64  # a slot each, of 1 MiB


def _fingerprint() -> Fingerprint:
    return Fingerprint(
        model_id="full", weights_hash="1", dtype="float32", num_layers=2, num_kv_heads=4,
        head_size=256,
    )  # fmt: skip


def _kv(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    return [
        (torch.randn(4, _TOKENS, 256, generator=generator),
         torch.randn(4, _TOKENS, 256, generator=generator))
        for _ in range(2)
    ]  # fmt: skip


def _tokens(number: int) -> list[int]:
    return [number] * _TOKENS


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    point = tmp_path / "disk"
    point.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(point)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(28 * _MIB)
        if subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True).returncode:
            pytest.skip("no mkfs.ext4")
        command = ["mount", "-o", "loop", str(image), str(point)]
    try:
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this user may not mount file systems")
    except FileNotFoundError:
        pytest.skip("no mount")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def _open(path: Path) -> KVStore:
    return KVStore(path, fingerprint=_fingerprint(), capacity_bytes=1 << 30)


def test_a_full_disk_replaces_the_oldest(small_disk: Path) -> None:
    path = small_disk / "store"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _open(path) as store:
            for number in range(60):
                evicted = store.stats()["evicted"]
                assert store.put(_tokens(number), _kv(number)) == _TOKENS
                # One for one; what the index took once is given back from a few slots more.
                assert store.stats()["evicted"] - evicted <= 6
                assert store.failure == ""
            for number in range(60, 64):
                session = store.session(f"s{number}")
                session.step(_tokens(number))
                assert session.commit(_kv(number)) == _TOKENS
            held = [n for n in range(64) if store.lookup(_tokens(n))]
            assert len(held) >= 10 and held == list(range(held[0], 64))  # the newest
        with _open(path) as store:
            for number in held:
                hit = store.lookup(_tokens(number))
                loaded = store.load(hit)
                assert torch.equal(loaded[1][0], _kv(number)[1][0])
            assert store.session("s63").tokens == _tokens(63)
            assert not store.verify().damage


def test_nothing_goes_where_there_is_space_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with _open(small_disk / "store") as store:
        ballast.write_bytes(os.urandom(8 * _MIB))
        number = 0
        while store.stats()["evicted"] == 0:
            store.put(_tokens(number), _kv(number))
            number += 1
        ballast.unlink()
        evicted = store.stats()["evicted"]
        for number in range(100, 103):
            assert store.put(_tokens(number), _kv(number)) == _TOKENS
        assert store.stats()["evicted"] == evicted


def test_one_warning_says_that_nothing_can_be_stored(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with _open(small_disk / "store") as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="No space"), ballast.open("wb") as file:
            for _ in range(64):
                file.write(os.urandom(_MIB))
                file.flush()
        for number in range(3):  # there is nothing to replace
            assert store.put(_tokens(number), _kv(number)) == 0
        assert len(caught) == 1 and caught[0].category is RuntimeWarning
        assert "no space left" in str(caught[0].message)
        assert "no space left" in store.failure
        ballast.unlink()
        assert store.put(_tokens(9), _kv(9)) == _TOKENS
        assert store.failure == "" and len(caught) == 1


def test_a_new_store_has_no_space(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"), (small_disk / "ballast").open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(_MIB))
            file.flush()
    with pytest.raises(OSError) as raised:
        _open(small_disk / "store")
    assert raised.value.errno == errno.ENOSPC
    assert "store" in str(raised.value)
