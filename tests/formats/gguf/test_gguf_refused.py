"""GGUF files that are no model which there is: what Decoding.from_pretrained() says of them."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from tests.support.causal_models import random_model
from tests.support.gguf_files import ARCHITECTURES, gguf, tensors_of, write_file, write_model

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
    (_add("uint16", "split.count", 3), "is one of 3 files of a model; expected one file"),
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


def test_olmo_3_is_no_olmo_2(tmp_path: Path) -> None:
    window = _add("uint32", "olmo2.attention.sliding_window", 7)
    write_model(tmp_path / "model.gguf", random_model("olmo2", "plain"), window)
    with pytest.raises(ValueError, match="with a window, OLMo 3; expected OLMo 2"):
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
