"""GGUF files in parts, and files of the hub's cache by the name of a quantization."""

import functools
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.formats.gguf import GgufFile
from lmdecode.serving.text_model import local_path, name_of
from tests.readers.gguf.raw_gguf import (
    BOOL,
    F32,
    STRING,
    U64,
    entry,
    file_of,
    string,
    tensor,
)
from tests.support.causal_models import random_model, random_tokens
from tests.support.gguf_files import gguf, write_model

U16, I32 = 2, 5


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen3", "plain")


@pytest.fixture
def parts(model: Any, tmp_path: Path, monkeypatch: Any) -> list[Path]:
    """A model as the package gguf splits it, the first part with metadata alone."""
    options = {"split_max_tensors": 9, "small_first_shard": True}
    monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, **options))
    write_model(tmp_path / "model.gguf", model, lambda w: w.add_custom_alignment(64))
    monkeypatch.undo()
    paths = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in paths] == [f"model-{i + 1:05}-of-00004.gguf" for i in range(4)]
    return paths


def test_any_part_is_the_whole(model: Any, parts: list[Path], tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf", model)
    whole, ids = GgufFile(tmp_path / "whole.gguf"), random_tokens(8)[None]
    want = lmdecode.Decoding.from_pretrained(tmp_path / "whole.gguf", dtype=None)
    for path in parts:
        assert name_of(path) == "model"
        file = GgufFile(path)
        assert file.path == parts[0] and set(file) == set(whole)
        assert file.metadata["general.architecture"] == "qwen3"
        for name in whole:
            assert torch.equal(file.tensor(name), whole.tensor(name))  # type: ignore[arg-type]
        decoding = lmdecode.Decoding.from_pretrained(path, dtype=None)
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(decoding.generate(ids, **options), want.generate(ids, **options))


def test_a_missing_part_is_named(parts: list[Path], tmp_path: Path) -> None:
    parts[2].unlink()
    for path in (parts[0], parts[3]):
        with pytest.raises(FileNotFoundError, match=rf"of 4: {re.escape(str(parts[2]))} is miss"):
            lmdecode.Decoding.from_pretrained(path, dtype=None)


def test_a_part_by_another_name(parts: list[Path]) -> None:
    for name in ("part.gguf", "model-00001-of-00004.gguf", "model-00002-of-00003.gguf"):
        other = parts[1].with_name(name)
        shutil.copy(parts[1], other)
        with pytest.raises(ValueError, match=r"is part 2 of 4; expected .* -00002-of-00004\.gguf"):
            GgufFile(other)


def split(no: int, count: int, total: int) -> list[bytes]:
    return [
        entry("split.no", U16, struct.pack("<H", no)),
        entry("split.count", U16, struct.pack("<H", count)),
        entry("split.tensors.count", I32, struct.pack("<i", total)),
    ]


NAME = entry("general.architecture", STRING, string("llama"))
A, B, DATA = tensor("a", (4,)), tensor("b", (4,)), bytes(16)
GOOD = (file_of([NAME, *split(0, 2, 2)], [A], DATA), file_of(split(1, 2, 2), [B], DATA))
_NO = split(0, 2, 2)[0]
BAD: dict[str, tuple[bytes, bytes, str]] = {
    "another count": (GOOD[0], file_of(split(1, 3, 2), [B], DATA), "split.count is 3; expected 2"),
    "another number": (GOOD[0], file_of(split(0, 2, 2), [B], DATA), "split.no is 0; expected 1"),
    "another total": (
        GOOD[0], file_of(split(1, 2, 5), [B], DATA), "split.tensors.count is 5; expected 2"),
    "fewer tensors": (
        file_of([NAME, *split(0, 2, 9)], [A], DATA), file_of(split(1, 2, 9), [B], DATA),
        "2 parts have 2 tensors; expected 9"),
    "a tensor twice": (GOOD[0], file_of(split(1, 2, 2), [A], DATA), "has the tensor 'a', as"),
    "no part": (GOOD[0], file_of([], [B], DATA), "split.no is None"),
    "an entry of its own": (
        GOOD[0], file_of([*split(1, 2, 2), NAME[:-5] + b"gemma"], [B], DATA),
        "has 'general.architecture'; expected it in the first part alone"),
    "a damaged part": (GOOD[0], GOOD[1][:-1], "tensor 'b' of shape"),
    "no number": (
        file_of([NAME, *split(0, 2, 2)[1:]], [A], DATA), GOOD[1], "split.no is None; expected"),
    "a number beyond": (file_of([NAME, *split(2, 2, 2)], [A], DATA), GOOD[1], "split.no is 2"),
    "no total": (
        file_of([NAME, *split(0, 2, 2)[:2]], [A], DATA), GOOD[1], "split.tensors.count is None"),
    "a total below 0": (
        file_of([NAME, *split(0, 2, -1)], [A], DATA), GOOD[1], "split.tensors.count is -1"),
    "a huge count": (
        file_of([NAME, _NO, entry("split.count", U64, struct.pack("<Q", 1 << 63))], [A], DATA),
        GOOD[1], "split.count is 9223372036854775808; expected an int, 0 to 99999"),
    "a count that is a text": (
        file_of([NAME, _NO, entry("split.count", STRING, string("2"))], [A], DATA),
        GOOD[1], "split.count is 2; expected an int"),
    "a count that is a bool": (
        file_of([NAME, _NO, entry("split.count", BOOL, b"\x01")], [A], DATA),
        GOOD[1], "split.count is True; expected an int"),
    "a number that is a float": (
        file_of([NAME, entry("split.no", F32, bytes(4)), *split(0, 2, 2)[1:]], [A], DATA),
        GOOD[1], "split.no is 0.0; expected an int"),
}  # fmt: skip


def put(folder: Path, first: bytes, second: bytes) -> Path:
    path = folder / "m-00001-of-00002.gguf"
    path.write_bytes(first)
    (folder / "m-00002-of-00002.gguf").write_bytes(second)
    return path


@pytest.mark.parametrize("case", BAD)
def test_parts_that_do_not_belong_together(case: str, tmp_path: Path) -> None:
    assert list(GgufFile(put(tmp_path, *GOOD))) == ["a", "b"]
    first, second, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        GgufFile(put(tmp_path, first, second))
    assert str(tmp_path) in str(error.value)


def test_every_cut_of_a_part_is_an_error(tmp_path: Path) -> None:
    for i, data in enumerate(GOOD):
        for size in range(len(data)):
            both = list(GOOD)
            both[i] = data[:size]
            with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
                GgufFile(put(tmp_path, *both))


@pytest.mark.parametrize("count", [0, 1])
def test_a_whole_file_that_was_in_parts(count: int, tmp_path: Path) -> None:
    path = tmp_path / "merged.gguf"
    path.write_bytes(file_of([NAME, *split(0, count, 1)], [A], DATA))
    assert list(GgufFile(path)) == ["a"]


def test_what_is_saved_of_parts_is_whole(tmp_path: Path) -> None:
    """The metadata alone, as a tokenizer is kept, must not ask for parts."""
    path = put(tmp_path, *GOOD)
    data = GgufFile(path).without_tensors()
    alone = tmp_path / "tokenizer.gguf"
    alone.write_bytes(data)
    found = GgufFile(alone)
    assert found.metadata == {**GgufFile(path).metadata, "split.count": 0} and not found.tensors


# --- the hub's cache ------------------------------------------------------------------------------


@pytest.fixture
def cache(model: Any, parts: list[Path], tmp_path: Path, monkeypatch: Any) -> Path:
    """A cache with two snapshots: files of some quantizations, one of them in parts."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    snapshots = tmp_path / "home" / "hub" / "models--unsloth--Tiny-GGUF" / "snapshots"
    for name, time in (("old", 1000), ("new", 2000)):
        folder = snapshots / name
        (folder / "BF16").mkdir(parents=True)
        for file in ("Tiny-Q4_K_M.gguf", "Tiny-UD-Q4_K_M.gguf", "mmproj-F32.gguf"):
            write_model(folder / file, model, lambda w, file=file: w.add_description(file))
        for part in parts:
            shutil.copy(part, folder / "BF16" / part.name.replace("model", "Tiny-BF16"))
        os.utime(folder, (time, time))
    return snapshots


def test_a_quantization_of_the_cache(cache: Path) -> None:
    for quant, name in (
        ("Q4_K_M", "Tiny-Q4_K_M.gguf"),
        ("q4_k_m", "Tiny-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "Tiny-UD-Q4_K_M.gguf"),
        ("BF16", "BF16/Tiny-BF16-00001-of-00004.gguf"),
    ):
        assert local_path(f"unsloth/Tiny-GGUF:{quant}") == cache / "new" / name
    (cache / "new" / "Tiny-Q4_K_M.gguf").unlink()
    assert local_path("unsloth/Tiny-GGUF:Q4_K_M").parent.name == "new", "UD ends in it, too"
    decoding = lmdecode.Decoding.from_pretrained("unsloth/Tiny-GGUF:BF16", dtype=None)
    assert decoding.generate(random_tokens(4)[None], max_new_tokens=2).shape == (1, 6)


def test_what_the_cache_does_not_have(cache: Path) -> None:
    there = r"it has Tiny-BF16, Tiny-Q4_K_M, Tiny-UD-Q4_K_M$"
    for load in (local_path, lmdecode.Decoding.from_pretrained):
        with pytest.raises(FileNotFoundError, match=there):
            load("unsloth/Tiny-GGUF:Q8_0")
        with pytest.raises(FileNotFoundError, match="no GGUF file of K_M in"):
            load("unsloth/Tiny-GGUF:K_M")
        with pytest.raises(FileNotFoundError, match="no GGUF file of F32 in"):
            load("unsloth/Tiny-GGUF:F32")  # a projector of images is no model
        with pytest.raises(FileNotFoundError, match=r"no model unsloth/Other in .*; it has unsl"):
            load("unsloth/Other:Q8_0")
    shutil.copy(cache / "new" / "Tiny-Q4_K_M.gguf", cache / "new" / "Mini-Q4_K_M.gguf")
    with pytest.raises(ValueError, match="may be Mini-Q4_K_M, Tiny-Q4_K_M; expected one of them"):
        local_path("unsloth/Tiny-GGUF:Q4_K_M")
