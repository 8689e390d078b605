"""Weights of converted models: those of the original, or what their quantization made of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.formats.ctranslate2 import open_folder
from tests.readers.ctranslate2.converted_models import (
    CAUSAL,
    QUANTIZATIONS,
    SEQ2SEQ,
    converted,
    original,
)

# The rows before the first position, which transformers has for no token.
UNUSED_ROWS = {"bart": 2, "m2m_100": 2, "mbart": 2}


def quantized(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Return weights [rows, ...] through CTranslate2's int8 or int16, by numpy alone."""
    weights = value.numpy().astype(np.float32)
    rows = weights.reshape(len(weights), -1)
    if kind == "int16":
        scale = np.float32(2**10 / np.abs(rows).max())
        return torch.from_numpy(np.rint(weights * scale) * (np.float32(1) / scale))
    most = np.abs(rows).max(axis=1)
    most[most == 0] = 127
    scale = (np.float32(127) / most)[:, None]
    return torch.from_numpy((np.rint(rows * scale) * (np.float32(1) / scale)).reshape(value.shape))


def expected(name: str, value: torch.Tensor, kind: str, is_quantized: bool) -> torch.Tensor:
    if is_quantized and kind.startswith("int"):
        return quantized(value, kind)
    floats = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return value.to(floats.get(kind.removeprefix("int8_"), torch.float32))


def named(model: Any) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | {n: b for n, b in model.named_buffers() if n.endswith("embed_positions.weights")}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kind", [*SEQ2SEQ, "whisper", *CAUSAL])
def test_weights(kind: str, quantization: str, root: Path) -> None:
    """Matrices of integers are those of linear layers, embeddings and convolutions."""
    source = open_folder(converted(kind, root, quantization))
    names = named(original(kind))
    assert names.keys() == source.parts.keys() - {"final_logits_bias"}
    fused = ("q_proj", "k_proj", "v_proj", ".q.", ".k.", ".v.", "c_attn", "qkv")
    for name, value in names.items():
        got, value = source.read(name), value.detach()
        is_matrix = value.dim() > 1 and "positions" not in name and "wpe" not in name
        is_matrix = is_matrix and "relative_attention_bias" not in name
        begin = UNUSED_ROWS.get(kind, 0) if "positions" in name else 0
        if quantization == "int16" and any(part in name for part in fused):
            continue  # the largest of all three makes the scale
        is_conv1d = kind == "gpt2" and is_matrix and ".h." in name
        value = value.T if is_conv1d else value
        want = expected(name, value, quantization, is_matrix)
        want = want.T if is_conv1d else want
        if kind == "gemma" and "norm" in name:
            want = want.float() + 1  # it is read as a Granite
        assert got.dtype == want.dtype, name
        assert torch.equal(got[begin:], want[begin:]), name


@pytest.mark.parametrize("kind", [*SEQ2SEQ, "whisper"])
def test_a_model_has_the_weights_of_its_file(kind: str, root: Path) -> None:
    """In float32, tied as the file has them."""
    folder = converted(kind, root, "int8_float16")
    source, model = open_folder(folder), lmdecode.Decoding.from_pretrained(folder).model
    for name, value in named(model).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, source.read(name).float()), name
    tied = model.get_output_embeddings().weight is model.get_decoder().embed_tokens.weight
    before = original(kind)
    was = before.get_output_embeddings().weight is before.get_decoder().embed_tokens.weight
    assert tied == was


@pytest.mark.parametrize("quantization", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", ["marian", "t5", "llama", "gemma3", "gpt2"])
def test_a_quantized_folder_is_the_model_of_its_values(
    kind: str, quantization: str, root: Path
) -> None:
    """Packed in int8 or float32 they give the tokens that transformers' model of them gives."""
    folder = converted(kind, root, quantization)
    ids = torch.randint(4, 60, (1, 7), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    decoding = lmdecode.Decoding.from_pretrained(folder)
    model = type(decoding.model)(decoding.model.config).eval()
    model.generation_config = decoding.model.generation_config
    source = open_folder(folder)
    state = {name: source.read(name).float() for name in source.parts}
    if "final_logits_bias" in state:
        state["final_logits_bias"] = state["final_logits_bias"][None]
    model.load_state_dict(state, strict=False)
    assert decoding.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    other = lmdecode.Decoding.from_pretrained(folder, "int8").generate(ids, **options)
    want = lmdecode.Decoding.from_pretrained(model, "int8").generate(ids, **options)
    assert other.tolist() == want.tolist()
