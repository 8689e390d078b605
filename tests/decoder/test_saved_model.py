"""``Decoding.save`` and ``Decoding.load``: mapped, whole, and packed again where need be."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.linear.formats import FORMATS
from lmdecode.readers.transformers.causal_models import causal_model_of
from tests.support.causal_models import random_model, random_tokens
from tests.support.other_capability import call_elsewhere
from tests.support.records import with_entries

ops = torch.ops.lmdecode
_TILE = slice(8, 20)  # of a packed weight's header
ROOT = Path(__file__).parents[2]
MODEL = ("qwen3", "biases, layer types, yarn")
NEW = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}


def _saved(folder: Path, dtype: str = "float32") -> lmdecode.Decoding:
    decoding = lmdecode.Decoding.from_pretrained(random_model(*MODEL), dtype, cache_dtype="int8")
    decoding.save(folder)
    return decoding


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_a_loaded_model_is_the_saved_one(dtype: str, tmp_path: Path) -> None:
    decoding = _saved(tmp_path / "model", dtype)
    loaded = lmdecode.Decoding.load(tmp_path / "model", verify=True)
    assert loaded.config == decoding.config and loaded.cache_dtype == "int8"
    prompt = random_tokens(9)[None]
    expected = decoding.generate(prompt, **NEW, num_beams=2)
    assert torch.equal(loaded.generate(prompt, **NEW, num_beams=2), expected)
    assert lmdecode.Decoding.load(tmp_path / "model", cache_dtype="bf16").cache_dtype == "bfloat16"


def test_what_is_saved_replaces_what_was_there(tmp_path: Path) -> None:
    _saved(tmp_path, "int8")
    before = lmdecode.Decoding.load(tmp_path)
    prompt = random_tokens(9)[None]
    expected = before.generate(prompt, **NEW)
    _saved(tmp_path, "bfloat16")
    assert torch.equal(before.generate(prompt, **NEW), expected)  # its file is mapped
    assert len(list(tmp_path.glob("weights-*.bin"))) == 1
    assert lmdecode.Decoding.load(tmp_path).decoder.weight_format == "bfloat16"


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Only the weights that the manifest before named are removed, and no file elsewhere."""
    folder, names = tmp_path / "model", ("weights-mine.bin", "weights-00000000.bin")
    folder.mkdir()
    for name in names:
        (folder / name).write_text("mine")
    (tmp_path / "weights-00000000.bin").write_text("mine")
    _saved(folder, "int8")
    manifest = json.loads((folder / "lmdecode.json").read_text())
    first = folder / manifest["weights"]["file"]
    _saved(folder, "bfloat16")
    assert not first.exists()
    manifest["weights"]["file"] = "../weights-00000000.bin"
    _write_manifest(folder, manifest)
    _saved(folder, "int8")
    for damaged in ("{", "[]", json.dumps({"weights": {"file": "weights-mine.bin"}})):
        (folder / "lmdecode.json").write_text(damaged)
        _saved(folder, "int8")
        assert lmdecode.Decoding.load(folder).decoder.weight_format == "int8"
    kept = [folder / name for name in names] + [tmp_path / "weights-00000000.bin"]
    assert all(path.read_text() == "mine" for path in kept)


def test_a_model_is_not_joined_with_the_config_of_another(tmp_path: Path) -> None:
    kjv = lmdecode.Decoding.from_pretrained(ROOT / "examples" / "kjv_mistral" / "model")
    of_kjv = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    kjv.save(tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} == of_kjv | {"lmdecode.json"}
    assert lmdecode.Decoding.load(tmp_path).model.config.vocab_size == kjv.config.vocab_size
    lmdecode.Decoding.load(tmp_path).save(tmp_path)  # whose folder is this one
    assert {path.name for path in tmp_path.glob("*.json")} == of_kjv | {"lmdecode.json"}
    _saved(tmp_path)
    names = {path.name for path in tmp_path.glob("*.json")}
    assert names == {"config.json", "generation_config.json", "lmdecode.json"}
    without = lmdecode.Decoding(*causal_model_of(random_model(*MODEL)))
    without.save(tmp_path)
    assert [path.name for path in tmp_path.glob("*.json")] == ["lmdecode.json"]
    assert lmdecode.Decoding.load(tmp_path).model is None


def test_a_model_without_a_config_in_a_folder_that_has_one(tmp_path: Path) -> None:
    """It is the user's: it stays, and is not of the model."""
    of_others = {"config.json": "{}", "tokenizer.json": "[]"}
    for name, text in of_others.items():
        (tmp_path / name).write_text(text)
    for _ in range(2):
        lmdecode.Decoding(*causal_model_of(random_model(*MODEL))).save(tmp_path)
        assert lmdecode.Decoding.load(tmp_path).model is None
        assert {name: (tmp_path / name).read_text() for name in of_others} == of_others


def test_a_model_whose_own_folder_has_more(tmp_path: Path) -> None:
    """What was there before the first save is not removed by the second."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "examples" / "kjv_mistral" / "model", folder)
    lmdecode.Decoding.from_pretrained(folder).save(folder)
    lmdecode.Decoding(*causal_model_of(random_model(*MODEL))).save(folder)
    assert (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file()
    assert lmdecode.Decoding.load(folder).model is None


def test_what_cannot_be_written_leaves_the_model_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _saved(tmp_path).generate(random_tokens(9)[None], **NEW)
    names, written = sorted(path.name for path in tmp_path.iterdir()), list[int]()
    sync = os.fsync

    def sync_twice(file: int) -> None:
        written.append(file)
        if len(written) == 3:
            raise OSError("no space left")
        sync(file)

    monkeypatch.setattr(os, "fsync", sync_twice)
    other = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))
    with pytest.raises(OSError, match="no space left"):
        other.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    loaded = lmdecode.Decoding.load(tmp_path, verify=True)
    assert torch.equal(loaded.generate(random_tokens(9)[None], **NEW), expected)


def test_a_config_that_is_gone(tmp_path: Path) -> None:
    _saved(tmp_path)
    (tmp_path / "config.json").unlink()
    message = r"^Decoding\.load: .* has no config\.json, which its lmdecode\.json names; expected"
    with pytest.raises(ValueError, match=message):
        lmdecode.Decoding.load(tmp_path)


def test_the_working_directory_is_no_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("of another model")
    monkeypatch.chdir(tmp_path)
    _saved(tmp_path / "model")
    assert not (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("dtype", sorted(FORMATS))
@pytest.mark.slow
def test_a_model_of_another_processor_is_packed_again(dtype: str, tmp_path: Path) -> None:
    """Bit for bit what is packed here from the start."""
    call_elsewhere("tests.decoder.test_saved_model:_saved", tmp_path, dtype)
    here = lmdecode.Decoding.from_pretrained(random_model(*MODEL), dtype)
    manifest = json.loads((tmp_path / "lmdecode.json").read_text())
    with pytest.warns(UserWarning, match="was packed for another kind of processor"):
        loaded = lmdecode.Decoding.load(tmp_path)
    assert torch.equal(loaded.decoder.memory, here.decoder.memory)
    assert manifest["weights"]["bytes"] == here.decoder.memory.numel()


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.pop("crc32"),
        lambda m: m["facts"].update(norms_all_heads=True),
        lambda m: m["weights"].update(bytes=10),
        lambda m: m.update(cache_dtype="float32"),
    ],
)
def test_damaged_manifests(damage: Callable[[Any], Any], tmp_path: Path) -> None:
    """With damaged numbers, a model would load and compute something else."""
    _saved(tmp_path)
    path = tmp_path / "lmdecode.json"
    manifest = json.loads(path.read_text())
    damage(manifest)
    path.write_text(json.dumps(manifest))
    message = r"^Decoding\.load: .* has a damaged lmdecode\.json \(its checksum is"
    with pytest.raises(ValueError, match=message):
        lmdecode.Decoding.load(tmp_path)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its checksum."""
    manifest.pop("crc32", None)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (folder / "lmdecode.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("facts"), r"damaged lmdecode\.json \('facts'\)"),
        (lambda m: m.update(version=4), "is of version 4, this is version 5: pack it again"),
        (lambda m: m.update(kind="encoder"), r"damaged lmdecode\.json \('encoder'\)"),
        (lambda m: m["weights"].update(bytes=10), "has .* bytes in .* instead of 10 bytes"),
        (lambda m: m["weights"].update(file="no.bin"), "has nothing in no.bin instead of"),
    ],
)
def test_manifests_of_other_models(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    """Whole ones, but not as ``save`` writes them; known at once, not at the first step."""
    _saved(tmp_path)
    manifest = json.loads((tmp_path / "lmdecode.json").read_text())
    change(manifest)
    _write_manifest(tmp_path, manifest)
    with pytest.raises(ValueError, match=r"^Decoding\.load: .*" + message):
        lmdecode.Decoding.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config.num_heads", 0, "num_heads is 0; expected"),
        ("config.other", 0, "unexpected keyword argument 'other'"),
        ("config.windows.other", 0, "object does not support item assignment"),
        ("config.windows", [None], "windows has 1 entries; expected num_layers, "),
        ("weight_format", "int3", "dtype is 'int3'"),
        ("weight_format", None, "'weight_format'"),
        ("layers.1.cache", 1, "layers.1.cache is not what the config says"),
        ("embedding_format", 4, "embedding_format is 4"),
        ("weights.layers.1.qkv", [1 << 40, 64], "qkv|a damaged header"),
        ("weights.layers.1.qkv", [64], "has 1 entries; expected 2|values to unpack"),
        ("weights.logits", None, "weights.logits"),
        ("other", 1, "a record with other; expected no entry"),
    ],
)
def test_records_of_other_models(name: str, value: Any, message: str, tmp_path: Path) -> None:
    """Whole ones, but not as ``save`` writes them; known at once, not at the first step."""
    _saved(tmp_path)
    (path,) = tmp_path.glob("weights-*.bin")
    memory = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    path.write_bytes(bytes(with_entries(memory, {name: value}).tolist()))
    with pytest.raises(ValueError, match=r"^Decoding\.load: .* has other weights .*" + message):
        lmdecode.Decoding.load(tmp_path)


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_where_a_packed_weight_says_how_it_is_cut(dtype: str) -> None:
    """``repack_linear`` takes it from these bytes, and writes its own there; others stay."""
    packed = ops.pack_linear(torch.ones(3, 70), FORMATS[dtype])
    assert bytes(packed[:4].tolist()) == b"LMDL"
    assert packed[4:8].view(torch.int32).tolist() == [FORMATS[dtype]]
    assert packed[24:40].view(torch.int64).tolist() == [70, 3]
    header = packed[:64].clone()
    header[24:40] = 0
    assert torch.equal(ops.repack_linear(header), header)  # a weight without elements
    width, _, _ = packed[_TILE].view(torch.int32).tolist()
    other = packed.clone()
    other[_TILE].view(torch.int32)[0] = 64 if width != 64 else 32
    repacked = ops.repack_linear(other)
    assert not torch.equal(other[_TILE], packed[_TILE])
    assert torch.equal(repacked[:64], packed[:64])
    other = packed.clone()
    other[_TILE].view(torch.int32)[1] = 0
    with pytest.raises(ValueError, match=f"in panels of {width} by 0; expected"):
        ops.repack_linear(other)


def test_a_manifest_says_nothing_twice(tmp_path: Path) -> None:
    """What a model of it has beside: worked out from it again."""
    packed = _saved(tmp_path).decoder
    loaded = lmdecode.Decoding.load(tmp_path).decoder
    assert loaded.record == {k: json.loads(json.dumps(v)) for k, v in packed.record.items()}
    assert loaded.config == packed.config
    manifest = json.loads((tmp_path / "lmdecode.json").read_text())
    assert manifest["facts"] == {}


def test_no_byte_of_the_manifest_may_be_another(tmp_path: Path) -> None:
    _saved(tmp_path)
    path = tmp_path / "lmdecode.json"
    data = path.read_bytes()
    for i in range(0, len(data), 29):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(ValueError, match=r"^Decoding\.load: .*(damaged lmdecode|of version)"):
            lmdecode.Decoding.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_configs(name: str, tmp_path: Path) -> None:
    _saved(tmp_path)
    text = (tmp_path / name).read_text()
    for damaged in ("", text[:-9], text.replace('"', "'")):
        (tmp_path / name).write_text(damaged)
        with pytest.raises(ValueError, match=rf"^Decoding\.load: .* has a damaged .*{name}"):
            lmdecode.Decoding.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=rf"^Decoding\.load: .* has no {name}"):
        lmdecode.Decoding.load(tmp_path)


def check_damaged_weights(folder: Path) -> None:
    (file,) = folder.glob("weights-*.bin")
    good = file.read_bytes()
    for place in (len(good) // 2, len(good) - 100):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"has other bytes in weights-.*than were written"):
            lmdecode.Decoding.load(folder, verify=True)
    file.write_bytes(good[:-1])
    with pytest.raises(ValueError, match="instead of"):
        lmdecode.Decoding.load(folder)


def test_damaged_weights(tmp_path: Path) -> None:
    _saved(tmp_path)
    check_damaged_weights(tmp_path)
    (tmp_path / "lmdecode.json").write_text("{")
    with pytest.raises(ValueError, match=r"has a damaged lmdecode\.json"):
        lmdecode.Decoding.load(tmp_path)
    (tmp_path / "lmdecode.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"^Decoding\.load: .* has no lmdecode\.json"):
        lmdecode.Decoding.load(tmp_path)
