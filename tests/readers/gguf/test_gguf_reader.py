"""The reader of GGUF files: what it gives of good ones, and what it says of bad ones."""

import re
import struct
from array import array as numbers
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.formats.gguf import GgufFile, is_gguf
from lmdecode.linear.quantized_weight import KINDS, QuantizedWeight
from lmdecode.readers.gguf import reader
from tests.readers.gguf.raw_gguf import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U32,
    U64,
    array,
    entry,
    file_of,
    string,
    tensor,
)
from tests.support.causal_models import random_model
from tests.support.gguf_files import (
    ARCHITECTURES,
    gguf,
    quantized,
    tensors_of,
    write_file,
    write_model,
)

_4 = struct.pack("<I", 4)
NAME = entry("general.architecture", STRING, string("llama"))
HUGE = (1 << 63) + 5
NESTED = array(U8, 0, b"")
for _ in range(8):
    NESTED = array(ARRAY, 1, NESTED)


def _write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", *KINDS])
def test_tensors_are_those_of_the_package(kind: str, tmp_path: Path) -> None:
    path, generator = tmp_path / "file.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, rows in (("first", 3), ("second", 5)):
        values = generator.normal(size=(rows, 512)).astype(np.float32)
        if kind in KINDS:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, quantized(values, kind), raw_dtype=number)
        else:
            writer.add_tensor(name, values.astype({"F32": "f4", "F16": "f2"}[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, expected = GgufFile(path), gguf.GGUFReader(path).tensors
    assert list(file) == ["first", "second"]
    for want in expected:
        values = gguf.quants.dequantize(want.data, want.tensor_type)
        got = file.tensor(want.name)
        assert isinstance(got, QuantizedWeight) == (kind in KINDS)
        floats = got.dequantize() if isinstance(got, QuantizedWeight) else got.float()
        assert np.array_equal(floats.numpy(), values)


def test_metadata(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    values: dict[str, Any] = {
        "uint8": 200, "int8": -5, "uint16": 60000, "int16": -300, "uint32": 1 << 31, "int32": -7,
        "uint64": 1 << 63, "int64": -(1 << 40), "float32": 0.5, "float64": 0.1, "bool": True,
        "string": "né\U0001f600",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_array("texts", ["a", "", "ab c"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(path).metadata
    assert {key: metadata[key] for key in values} == values
    assert metadata["ints"] == numbers("i", [1, -2, 3])
    assert metadata["floats"] == numbers("f", [0.5, 2.0])
    assert list(metadata["texts"]) == ["a", "", "ab c"]
    assert metadata["texts"][1:] == ["", "ab c"] and metadata["texts"][-1] == "ab c"


def test_bytes_of_tensors_lie_in_the_file(tmp_path: Path) -> None:
    """An alignment of less than a float's, and shapes of one to four dimensions."""
    data = np.arange(24, dtype=np.float32).tobytes()
    sizes = [(24,), (6, 4), (2, 3, 4), (2, 1, 3, 4)]
    tensors = [tensor(f"t{i}", size, offset=100 * i) for i, size in enumerate(sizes)]
    head = [NAME, entry("general.alignment", U32, struct.pack("<I", 1))]
    for shift in range(4):
        key = entry("x" * (shift + 1), STRING, string(""))
        body = b"".join(data + bytes(4) for _ in sizes)
        file = GgufFile(_write(tmp_path, file_of([*head, key], tensors, body, alignment=1)))
        for name, size in zip(file, sizes, strict=True):
            found = file.tensor(name)
            assert isinstance(found, torch.Tensor)
            assert found.shape == size[::-1]
            assert found.reshape(-1).tolist() == list(range(24))


def test_nothing_is_read_but_what_is_asked_for(tmp_path: Path) -> None:
    """A tensor of a terabyte, in a file that has no more than its end."""
    path = _write(tmp_path, file_of([NAME], [tensor("a", (1 << 20, 1 << 18))]))
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size + (1 << 40))
        if file.seek(0, 2) != size + (1 << 40):
            pytest.skip("no sparse files")
    try:
        found = GgufFile(path).tensor("a")
    except RuntimeError as error:  # of a machine that does not map so much
        pytest.skip(str(error))
    assert isinstance(found, torch.Tensor)
    assert found[-1, -1] == 0


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "has 0 bytes; expected 24"),
    "too short": (b"GGUF\x03\0\0\0", "has 8 bytes; expected 24"),
    "another beginning": (file_of(magic=b"GGML"), "begins with b'GGML'; expected b'GGUF'"),
    "version 1": (file_of(version=b"\x01\0\0\0"), "is of version 1; expected version 2 or 3"),
    "a later version": (file_of(version=b"\x04\0\0\0"), "is of version 4; expected"),
    "big-endian": (file_of(version=b"\0\0\0\x03"), "is of version 3, big-endian; expected"),
    "huge metadata": (file_of(num_entries=HUGE), f"metadata has {HUGE} entries"),
    "huge table": (file_of([NAME], num_tensors=HUGE), f"table of tensors has {HUGE} entries"),
    "more entries than there": (file_of([NAME], num_entries=2), "key 1 of its metadata is"),
    "a long key": (file_of([string("k", HUGE) + _4 + _4]), f"key 0 of the metadata takes {HUGE}"),
    "a key that is no text": (file_of([entry(b"\xff\xfe", U32, _4)]), "is no UTF-8"),
    "a key twice": (file_of([NAME, NAME]), "has 'general.architecture' twice"),
    "a type that there is not": (file_of([entry("k", 13, _4)]), "'k' has the type 13; expected"),
    "a long string": (file_of([entry("k", STRING, string("v", 1 << 40))]), "'k' takes 109951"),
    "a string that is no text": (file_of([entry("k", STRING, string(b"\xc3"))]), "is no UTF-8"),
    "a long array of numbers": (
        file_of([entry("k", ARRAY, array(U64, HUGE, _4))]), f"'k' has {HUGE} entries"),
    "an array whose bytes overflow": (
        file_of([entry("k", ARRAY, array(U64, 1 << 61, _4))]), f"'k' has {1 << 61} entries"),
    "a long array of strings": (
        file_of([entry("k", ARRAY, array(STRING, 1 << 50, string("v")))]),
        f"'k' has {1 << 50} entries"),
    "a long array of arrays": (
        file_of([entry("k", ARRAY, array(ARRAY, 1 << 50, NESTED))]), f"'k' has {1 << 50} entries"),
    "an array of a type that there is not": (
        file_of([entry("k", ARRAY, array(99, 1, _4))]), "'k' is an array of the type 99"),
    "arrays within arrays": (file_of([entry("k", ARRAY, NESTED)]), "'k' has arrays within arrays"),
    "alignment 0": (file_of([entry("general.alignment", U32, bytes(4))]), "alignment is 0"),
    "alignment 24": (
        file_of([entry("general.alignment", U32, struct.pack("<I", 24))]), "alignment is 24"),
    "a huge alignment": (
        file_of([entry("general.alignment", U32, struct.pack("<I", 1 << 31))]), "alignment is 214"),
    "an alignment that is a text": (
        file_of([entry("general.alignment", STRING, string("32"))]), "alignment is '32'"),
    "an alignment that is a bool": (
        file_of([entry("general.alignment", BOOL, b"\x01")]), "alignment is True"),
    "an alignment that is a float": (
        file_of([entry("general.alignment", F32, struct.pack("<f", 32))]), "alignment is 32.0"),
    "no dimension": (file_of([], [tensor("a", ())]), "'a' has 0 dimensions"),
    "five dimensions": (file_of([], [tensor("a", (1,) * 5)]), "'a' has 5 dimensions"),
    "four billion dimensions": (
        file_of([], [tensor("a", (1,), num_dims=(1 << 32) - 1)]), "'a' has 4294967295 dimensions"),
    "a dimension of 0": (file_of([], [tensor("a", (4, 0))]), "'a' has shape [0, 4]"),
    "dimensions that overflow": (
        file_of([], [tensor("a", (1 << 32, 1 << 32))], bytes(64)), "fewer than 2^62 elements"),
    "bytes that overflow": (file_of([], [tensor("a", (1 << 61,))]), f"takes {1 << 63} bytes"),
    "a type that ggml does not have": (
        file_of([], [tensor("a", (32,), 99)], bytes(64)), "'a' is of the type of number 99"),
    "a type that there is not here": (
        file_of([], [tensor("a", (256,), 16)], bytes(64)), "'a' is of the type IQ2_XXS; expe"),
    "rows that are no whole blocks": (
        file_of([], [tensor("a", (48, 2), 2)], bytes(64)),
        "'a' has rows of 48 elements; expected a multiple of 32, as its type is Q4_0"),
    "rows of parts of blocks, in all whole ones": (
        file_of([], [tensor("a", (128, 2), 12)], bytes(144)), "expected a multiple of 256"),
    "an offset outside": (
        file_of([], [tensor("a", (8,), offset=64)], bytes(64)), "'a' of shape [8] takes 32 bytes"),
    "a huge offset": (
        file_of([], [tensor("a", (8,), offset=(1 << 64) - 32)], bytes(64)), "takes 32 bytes"),
    "an end outside": (file_of([], [tensor("a", (17,))], bytes(64)), "takes 68 bytes"),
    "an offset between": (
        file_of([], [tensor("a", (8,), offset=16)], bytes(64)), "is at 16; expected a multiple of"),
    "two of one name": (
        file_of([], [tensor("a", (8,)), tensor("a", (8,), offset=32)], bytes(64)),
        "two tensors 'a'"),
    "an overlap": (
        file_of([], [tensor("a", (9,)), tensor("b", (8,), offset=32)], bytes(96)),
        "tensors 'a' and 'b' overlap"),
    "a table that is cut": (
        file_of([], [tensor("a", (8,))[:14]], num_tensors=1, alignment=1),
        "the table of tensors has 1 entries"),
    "a long name": (file_of([], [string("a", HUGE) + bytes(64)]), "the name of tensor 0 takes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    path = _write(tmp_path, data)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        GgufFile(path)
    assert str(raised.value).startswith(f"{path} is no GGUF file that can be read: ")


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    blocks = bytes(18 * 4)
    data = file_of(
        [NAME, entry("k", ARRAY, array(STRING, 2, string("ab") + string("c")))],
        [tensor("a", (8,)), tensor("b", (32, 4), 2, 32)],
        bytes(32) + blocks,
    )
    GgufFile(_write(tmp_path, data))
    for size in range(len(data)):
        with pytest.raises(ValueError, match="is no GGUF file that can be read"):
            GgufFile(_write(tmp_path, data[:size]))


def test_blocks_of_no_matrix(tmp_path: Path) -> None:
    file = GgufFile(_write(tmp_path, file_of([], [tensor("a", (32, 2, 2), 2)], bytes(72))))
    with pytest.raises(ValueError, match=r"'a' in blocks has shape \[2, 2, 32\]"):
        file.tensor("a")
    with pytest.raises(KeyError):
        file.tensor("b")


def test_which_paths_are_of_such_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(file_of([NAME]))
    (tmp_path / "b").write_bytes(b"{}")
    (tmp_path / "c.gguf").write_bytes(b"")
    (tmp_path / "d.gguf").mkdir()
    assert [is_gguf(tmp_path / name) for name in ("a", "b", "c.gguf", "d.gguf", "e.gguf")] == [
        True, False, True, False, False,
    ]  # fmt: skip
    with pytest.raises(OSError):
        GgufFile(tmp_path / "e.gguf")


def test_types_are_called_as_the_package_calls_them() -> None:
    known = {**reader._BLOCKS, **reader._OTHERS, 0: "F32", 1: "F16", 30: "BF16"}
    assert known == {kind.value: kind.name for kind in gguf.GGMLQuantizationType}


KEY = "llama.{}".format


def _llama(path: Path, *entries: Any, kinds: Any = None, **more: Any) -> None:
    write_model(path, random_model("llama", "plain"), *entries, kinds=kinds, **more)


def _replaced(path: Path, key: str, value: Any) -> None:
    """Write a Llama whose entry is another: of the type that it had, or a text."""

    def change(writer: Any) -> None:
        entries = writer.kv_data[0]
        if value is None:
            del entries[key]
        elif isinstance(value, str):
            entries[key] = gguf.GGUFValue(value=value, type=gguf.GGUFValueType.STRING)
        else:
            entries[key].value = value

    _llama(path, change)


BAD_ENTRIES: list[tuple[str, Any, str]] = [
    ("general.architecture", "mamba",
     "is of the architecture 'mamba'; expected one of falcon-h1, gemma2,"),
    (KEY("block_count"), None, "has None for llama.block_count; expected one int of at least 1"),
    (KEY("block_count"), 3, "has tensors of 2 layers; expected 3"),
    (KEY("block_count"), 2**31 - 2, "has tensors of 2 layers; expected 2147483646"),
    (KEY("embedding_length"), 33, "token_embd.weight of shape [101, 32]; expected [tokens, 33]"),
    (KEY("embedding_length"), "32", "has '32' for llama.embedding_length"),
    (KEY("attention.head_count"), 0, "has 0 for llama.attention.head_count"),
    (KEY("attention.head_count"), 2**31 - 2, "has 32 query features; expected 2147483646 heads"),
    (KEY("attention.head_count_kv"), 1, "attn_k.weight of shape [16, 32]; expected [8, 32]"),
    (KEY("attention.value_length"), 9, "has values of 9 features; expected keys', 8"),
    (KEY("feed_forward_length"), 45, "ffn_gate.weight of shape [44, 32]; expected [45, 32]"),
    (KEY("rope.dimension_count"), 4, "turns 4 of 8 features of a head; expected all of them"),
    (KEY("rope.freq_base"), float("nan"), "has nan for llama.rope.freq_base; expected a number"),
    (KEY("attention.layer_norm_rms_epsilon"), float("inf"), "has inf for llama.attention"),
    ("tokenizer.ggml.eos_token_id", 101, "has 101 for tokenizer.ggml.eos_token_id; expected a"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD_ENTRIES, ids=lambda case: f"{case[0]} {case[1]}")
def test_entries_that_make_no_sense(case: tuple[str, Any, str], tmp_path: Path) -> None:
    key, value, message = case
    path = tmp_path / "model.gguf"
    _replaced(path, key, value)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        lmdecode.Decoding.from_pretrained(path)
    assert str(path) in str(raised.value)


def _add(kind: str, key: str, value: Any) -> Any:
    return lambda writer: getattr(writer, f"add_{kind}")(key, value)


MORE_ENTRIES: list[tuple[Any, str]] = [
    (_add("uint16", "split.count", 3), "its split.no is None; expected an int, 0 to 2"),
    (_add("uint32", KEY("expert_count"), 8), "is a mixture of experts; expected a dense model"),
    (_add("string", KEY("rope.scaling.type"), "longrope"), "of the type 'longrope'; expected none"),
    (_add("string", KEY("rope.scaling.type"), "linear"), "has None for llama.rope.scaling.factor"),
    (_add("array", KEY("attention.key_length"), [8, 9]), "has array('i', [8, 9]) for llama.atten"),
]


@pytest.mark.parametrize("case", MORE_ENTRIES, ids=lambda case: case[1][:40])
def test_models_that_there_are_not(case: tuple[Any, str], tmp_path: Path) -> None:
    _llama(tmp_path / "model.gguf", case[0])
    with pytest.raises(ValueError, match=re.escape(case[1])):
        lmdecode.Decoding.from_pretrained(tmp_path / "model.gguf")


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"blk.1.ffn_up.weight": None}, "has no tensor 'blk.1.ffn_up.weight'; expected one"),
    ({"token_embd.weight": None}, "has no tensor 'token_embd.weight'; expected one"),
    ({"blk.0.attn_q.weight": None, "blk.0.attn_qkv.weight": torch.ones(64, 32)}, "has no tensor"),
    ({"blk.0.attn_q_norm.weight": torch.ones(8)}, "has 1 tensors that its architecture does not"),
    ({"blk.2.attn_norm.weight": torch.ones(32)}, "has tensors of 3 layers; expected 2"),
    ({"blk": torch.ones(32)}, "has 1 tensors that its architecture does not have, 'blk' one of th"),
    ({"token_embd.weight": torch.ones(32)}, "has token_embd.weight of shape [32]"),
    ({"rope_freqs.weight": torch.ones(3)}, "has rope_freqs.weight of shape [3]; expected one"),
    ({"rope_factors_long.weight": torch.ones(4)}, "of the type 'longrope'"),
    ({"output_norm.weight": torch.ones(31)}, "has output_norm.weight of shape [31]; expected [32]"),
]  # fmt: skip


@pytest.mark.parametrize("case", TENSORS, ids=lambda case: str(list(case[0])))
def test_tensors_that_are_not_expected(case: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    changes, message = case
    path, model = tmp_path / "model.gguf", random_model("llama", "plain")
    _llama(path)
    entries = {
        name: (field.contents(), field.types[0])
        for name, field in gguf.GGUFReader(path).fields.items()
        if "." in name and name != "general.architecture" and not name.startswith("GGUF.")
    }
    tensors = {**tensors_of(model), **changes}

    def add(writer: Any) -> None:
        for name, (value, kind) in entries.items():
            writer.add_key_value(name, value, kind)

    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_file(path, ARCHITECTURES["llama"], kept, add)
    with pytest.raises(ValueError, match=re.escape(message)):
        lmdecode.Decoding.from_pretrained(path)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0))
    with pytest.raises(ValueError, match=r"model\.gguf is no GGUF file that can be read"):
        lmdecode.Decoding.from_pretrained(path)
    path.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="it has 6 bytes"):
        lmdecode.Decoding.from_pretrained(path)
    with pytest.raises(OSError):
        lmdecode.Decoding.from_pretrained(tmp_path / "no.gguf")


def test_a_dtype_that_there_is_not(tmp_path: Path) -> None:
    _llama(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="dtype is 'q4_0'; expected one of float32"):
        lmdecode.Decoding.from_pretrained(tmp_path / "model.gguf", "q4_0")
