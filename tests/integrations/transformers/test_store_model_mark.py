"""Another model of the same shape never meets a store's keys and values without a word."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from store_models import CHUNK, model_of
from torch import nn

from lmdecode.integrations.transformers import generate_with_store
from lmdecode.integrations.transformers.store.__main__ import main as why_of_a_model
from lmdecode.store import Fingerprint, FingerprintMismatchError, KVStore, weights_mark
from lmdecode.store.__main__ import main

_IDS = torch.tensor([[3, 7, 11, 5]])


def _open(folder: Path, fingerprint: Fingerprint, **options: object) -> KVStore:
    settings: dict[str, object] = {"capacity_bytes": 1 << 26, "chunk_tokens": CHUNK, **options}
    return KVStore(folder, fingerprint=fingerprint, **settings)  # type: ignore[arg-type]


def _fine_tuned(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.01
    return other


def test_a_fine_tune_with_the_base_models_store_is_an_error(tmp_path: Path) -> None:
    base = copy.deepcopy(model_of("llama"))
    base.config._name_or_path, tuned = "base-model", _fine_tuned(base)
    tuned.config._name_or_path = "tuned-model"
    with _open(tmp_path, Fingerprint.from_model(base)) as store:
        expected = generate_with_store(base, store, "a", _IDS, max_new_tokens=4)
        with pytest.raises(FingerprintMismatchError, match=r"base-model.*tuned-model") as raised:
            generate_with_store(tuned, store, "b", _IDS, max_new_tokens=4)
        assert isinstance(raised.value, ValueError)
        assert weights_mark(base) in str(raised.value) and weights_mark(tuned) in str(raised.value)
        assert [name for name, _ in store.sessions()] == ["a"]
        again = generate_with_store(base, store, "c", _IDS, max_new_tokens=4)
    assert torch.equal(again, expected)


def test_weights_changed_in_place_are_an_error(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of("llama"))
    with _open(tmp_path, Fingerprint.from_model(model)) as store:
        ids = generate_with_store(model, store, "a", _IDS, max_new_tokens=4)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        with pytest.raises(FingerprintMismatchError):
            generate_with_store(model, store, "a", ids, max_new_tokens=4)


def test_a_fingerprint_of_ones_own_remembers_the_first_model(tmp_path: Path) -> None:
    model = model_of("llama")
    own = replace(Fingerprint.from_model(model), weights_hash="mine", mark=None)
    with _open(tmp_path, own) as store:
        generate_with_store(model, store, "a", _IDS, max_new_tokens=2)
    with _open(tmp_path, own) as store, pytest.raises(FingerprintMismatchError):
        generate_with_store(_fine_tuned(model), store, "a", _IDS, max_new_tokens=2)
    with pytest.raises(FingerprintMismatchError, match=r"KVStore: .*weights"):
        _open(tmp_path, replace(own, mark="0" * 32))
    with _open(tmp_path, own, readonly=True) as reader:
        reader.check_model(model)
        with pytest.raises(FingerprintMismatchError):
            reader.check_model(_fine_tuned(model))


def test_stores_of_old_open_and_learn_the_mark(tmp_path: Path) -> None:
    model = model_of("llama")
    fingerprint = Fingerprint.from_model(model)
    # The fields that a store of the first format has, and no others: its name stays.
    assert set(json.loads(fingerprint.encoded())) == {
        "model_id", "weights_hash", "dtype", "num_layers", "num_kv_heads", "head_size", "rope",
        "window", "layout", "tensor_parallel_rank", "tokenizer_hash",
    }  # fmt: skip
    assert Fingerprint.decoded(fingerprint.encoded()) == fingerprint
    with _open(tmp_path, fingerprint) as store:
        generate_with_store(model, store, "a", _IDS, max_new_tokens=2)
    (tmp_path / fingerprint.name / "model.json").unlink()
    with _open(tmp_path, fingerprint) as store:
        assert store.session("a").tokens
    known = json.loads((tmp_path / fingerprint.name / "model.json").read_bytes())
    assert known["mark"] == weights_mark(model)
    with _open(tmp_path, fingerprint) as store:
        store.backup(tmp_path / "copy")
    copied = tmp_path / "copy" / fingerprint.name / "model.json"
    assert json.loads(copied.read_bytes()) == known


def test_every_weight_is_looked_at() -> None:
    model = copy.deepcopy(model_of("llama"))
    mark = weights_mark(model)
    assert weights_mark(copy.deepcopy(model)) == mark
    for parameter in model.parameters():
        with torch.no_grad():
            parameter += 1
        assert weights_mark(model) != mark
        with torch.no_grad():
            parameter -= 1
    # The same numbers in other strides.
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weights_mark(model)
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous() and weights_mark(model) == before


def test_adapters_are_the_contexts_matter() -> None:
    class Adapted(nn.Module):
        adapter_layer_names = ("lora_A",)

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 4)})

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mark = weights_mark(model)
    model[0] = Adapted(model[0])
    assert weights_mark(model) == mark


def test_ls_and_why_name_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(
        Fingerprint.from_model(model_of("llama")), model_name="people/llama", revision="r1"
    )
    other = replace(one, tokenizer_hash="t")
    for fingerprint in (one, other):
        _open(tmp_path, fingerprint).close()
    assert main(["ls", str(tmp_path)]) == 0
    assert "people/llama at r1" in capsys.readouterr().out
    assert main(["why", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "differ in" in out and "tokenizer_hash" in out and "weights_hash" not in out


def test_why_tells_a_model_with_and_without_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from store_models import SHIPPED
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    _open(tmp_path, Fingerprint.from_model(model)).close()
    assert why_of_a_model([str(tmp_path), str(SHIPPED)]) == 0
    out = capsys.readouterr().out
    assert "without its tokenizer\n" in out and "with its tokenizer, nothing stored" in out
    assert "tokenizer_hash" in out
