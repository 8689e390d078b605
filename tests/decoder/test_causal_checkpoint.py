"""Decoding.from_pretrained() of folders of decoder-only models: what transformers reads of them."""

import copy
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import lmdecode
from lmdecode.readers.transformers.stand_in import skeleton
from tests.support.causal_models import CASES, random_model, random_tokens

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


@pytest.mark.parametrize("is_read_whole", [True, False])
def test_a_model_of_a_folder_that_is_not_kept(is_read_whole: bool, tmp_path: Path) -> None:
    tensors, embedding = _saved(TIED[0], tmp_path)
    if is_read_whole:
        tensors["lm_head.weight"] = tensors[embedding].flip(0)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = _check_folder(tmp_path)
    decoding = lmdecode.Decoding.from_pretrained(tmp_path, keep_model=False)
    assert type(decoding.model) is type(expected.model) and not decoding.model.training
    parameters = list(decoding.model.parameters())
    assert all(set(p.stride()) == {0} and p.untyped_storage().nbytes() == 4 for p in parameters)
    ids = random_tokens(9)[None]
    assert torch.equal(decoding.generate(ids, **OPTIONS), expected.generate(ids, **OPTIONS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_skeleton_has_the_buffers_of_the_model(case: tuple[str, str]) -> None:
    model = random_model(*case)
    made = skeleton(copy.deepcopy(model.config))
    assert [(name, p.shape) for name, p in made.named_parameters()] == [
        (name, p.shape) for name, p in model.named_parameters()
    ]
    assert all(set(p.stride()) == {0} and p.device.type == "cpu" for p in made.parameters())
    buffers, expected = dict(made.named_buffers()), dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    of_folder = model.state_dict().keys()  # are read, as parameters are
    assert all(torch.equal(buffers[name], expected[name]) for name in expected.keys() - of_folder)


def test_a_buffer_that_is_written_to_after_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", "plain")
    kind = type(model.model.rotary_emb)
    init = kind.__init__

    def init_with_empty(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.inv_freq = torch.empty(self.inv_freq.shape).copy_(self.inv_freq)

    monkeypatch.setattr(kind, "__init__", init_with_empty)
    made = skeleton(copy.deepcopy(model.config))
    assert torch.equal(made.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_models_are_loaded_in_many_threads(tmp_path: Path) -> None:
    """Modules that other threads make meanwhile, and all that are made later, have weights."""
    _saved(("llama", "plain"), tmp_path)
    register = torch.nn.Module.register_parameter
    interval = sys.getswitchinterval()
    done, on_meta, failed = threading.Event(), list[bool](), list[Exception]()

    def make_modules() -> None:
        while not done.is_set():
            on_meta.append(torch.nn.Linear(2, 2).weight.is_meta)

    def load() -> None:
        try:
            for _ in range(4):
                lmdecode.Decoding.from_pretrained(tmp_path)
        except Exception as error:
            failed.append(error)

    other = threading.Thread(target=make_modules)
    loaders = [threading.Thread(target=load) for _ in range(4)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in (other, *loaders):
            thread.start()
        for thread in loaders:
            thread.join()
    finally:
        done.set()
        other.join()
        sys.setswitchinterval(interval)
        is_patched = torch.nn.Module.register_parameter is not register
        torch.nn.Module.register_parameter = register
    assert on_meta and not any(on_meta)
    assert not is_patched and not failed
