"""Decoding.from_pretrained() of folders of decoder-only models: what transformers reads of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import lmdecode
from tests.support.causal_models import random_model, random_tokens

TIED = [("qwen3", "plain"), ("gemma3_text", "plain"), ("gpt2", "plain")]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def _saved(case: tuple[str, str], folder: Path) -> tuple[dict[str, Tensor], str]:
    """Write a model; returns its tensors, and the name of its embedding."""
    copy.deepcopy(random_model(*case)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = (
        name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))
    )
    return tensors, embedding


def _check_folder(folder: Path) -> lmdecode.Decoding:
    """Tokens are those of the model that transformers reads from the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    decoding = lmdecode.Decoding.from_pretrained(folder)
    ids = random_tokens(9)[None]
    assert torch.equal(decoding.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
    return decoding


@pytest.mark.parametrize("case", TIED, ids=str)
@pytest.mark.parametrize("head", ["the embedding's", "its own"])
def test_a_tied_head_that_the_folder_has(head: str, case: tuple[str, str], tmp_path: Path) -> None:
    """Transformers ties it where its weights are the embedding's, and keeps its own ones."""
    tensors, embedding = _saved(case, tmp_path)
    weight = tensors[embedding].clone()
    tensors["lm_head.weight"] = weight if head == "the embedding's" else weight.flip(0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoding = _check_folder(tmp_path)
    # Equal ones are read one by one, as ever.
    is_whole = any(0 not in p.stride() for p in decoding.model.parameters())
    assert is_whole == (head == "its own")


@pytest.mark.parametrize("case", TIED, ids=str)
def test_a_tied_head_without_the_embedding(case: tuple[str, str], tmp_path: Path) -> None:
    """Transformers takes the head's weights as the embedding, too."""
    tensors, embedding = _saved(case, tmp_path)
    tensors["lm_head.weight"] = tensors.pop(embedding).flip(0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _check_folder(tmp_path)


def test_a_folder_with_an_index_beside_a_whole_file(tmp_path: Path) -> None:
    """Transformers reads the whole one."""
    tensors, _ = _saved(("llama", "plain"), tmp_path)
    other = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
    save_file(other, tmp_path / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _check_folder(tmp_path)
