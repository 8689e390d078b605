"""The block of a GGUF file that predicts further tokens: against transformers' layers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.linear.quantized_weight import QuantizedWeight
from lmdecode.readers.gguf.model import load_parts
from tests.decoder.test_mtp import run
from tests.support.causal_models import model_of, random_config, random_tokens
from tests.support.drafts import counted
from tests.support.gguf_checks import check_tokens, replaced
from tests.support.gguf_files import write_model
from tests.support.mtp_gguf import write_mtp_model
from tests.support.mtp_models import MtpModel, agreeing_model, mtp_model

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("plain", {}),
    "qwen3_5_moe_text": ("plain", {}),
    "qwen3_next": ("experts and dense layers", {"mlp_only_layers": []}),
}
# Rows of whole blocks.
_SIZES = {
    "hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32,
}  # fmt: skip
BLOCK = "blk.4."


def _model(kind: str, **more: Any) -> MtpModel:
    variant, some = KINDS[kind]
    return mtp_model(kind, variant, **some, **more)


def loaded(path: Path, dtype: Any = "float32", *, mtp: bool = True) -> Any:
    return lmdecode.Decoding.from_pretrained(path, dtype, mtp=mtp)


def _check_rows(packed: Any, model: MtpModel) -> None:
    """Logits and hidden rows of what predicts further tokens are those of the plain layer."""
    tokens = random_tokens(30)
    hidden = model.hidden(tokens)[:-1]
    got = run(packed.mtp, tokens[1:], [19, 4, 6], hidden)
    for values, right in zip(got, model.read(tokens[1:], hidden), strict=True):
        torch.testing.assert_close(values, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_layer_of_transformers(kind: str, tmp_path: Path) -> None:
    model, path = _model(kind), tmp_path / "model.gguf"
    write_mtp_model(path, model)
    decoding = loaded(path)
    _check_rows(decoding.decoder, model)
    check_tokens(path, model.model)
    without = loaded(path, mtp=False)
    assert without.decoder.mtp is None
    assert without.fingerprint() == decoding.fingerprint()
    decoding.save(tmp_path / "saved")
    again: Any = lmdecode.Decoding.load(tmp_path / "saved", verify=True)
    _check_rows(again.decoder, model)


def test_a_block_without_a_norm_of_its_own(tmp_path: Path) -> None:
    """It has the model's, as llama.cpp takes it."""
    model, path = _model("qwen3_5_text"), tmp_path / "model.gguf"
    model.layer.model.norm.weight.data.copy_(model.trunk.norm.weight)
    write_mtp_model(path, model, without={f"{BLOCK}nextn.shared_head_norm.weight"})
    _check_rows(loaded(path).decoder, model)


def test_frequencies_are_divided_in_both(tmp_path: Path) -> None:
    model, path = _model("qwen3_5_text", **_SIZES), tmp_path / "model.gguf"
    write_mtp_model(path, model)
    undivided = load_parts(path, mtp=True)[2]
    write_mtp_model(path, model, **{"rope_freqs.weight": torch.full((8,), 4.0)})
    weights = load_parts(path, mtp=True)[2]
    for divided, whole in ((weights, undivided), (weights.mtp[1], undivided.mtp[1])):
        for found, others in zip(divided.rotary, whole.rotary, strict=True):
            assert found is not None and torch.equal(4.0 * found, others)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_read_and_the_text_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = agreeing_model(kind, KINDS[kind][0]), tmp_path / "model.gguf"
    if kind == "qwen3_next":  # files have experts in every layer
        config = random_config(kind, KINDS[kind][0], **KINDS[kind][1])
        model = model._replace(model=model_of(config))
    write_mtp_model(path, model)
    decoding = loaded(path)
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
    ids = random_tokens(9)[None]
    expected = decoding.generate(ids, **options)
    steps = counted(monkeypatch, decoding.decoder)
    assert decoding.generate(ids, assistant_model="mtp", **options).equal(expected)
    assert max(steps) > 1
    assert kind == "qwen3_next" or len(steps) < 20  # the others' drafts are nearly all right


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_weights_in_blocks(kind: str, type_name: str, tmp_path: Path) -> None:
    model, path = _model(kind, **_SIZES), tmp_path / "model.gguf"
    floats = ("conv", "ffn_gate_inp", "ssm_norm")
    write_mtp_model(
        path, model,
        kinds=lambda name: "F32" if any(part in name for part in floats) else type_name,
    )  # fmt: skip
    (_, kept), (_, read) = (
        load_parts(path, keeps_blocks=keeps, mtp=True)[2].mtp for keeps in (True, False)
    )
    matrix = kept.layers[0].attention_out
    assert isinstance(matrix, QuantizedWeight) and matrix.kind == type_name
    assert matrix.dequantize().equal(read.layers[0].attention_out)
    for name in ("embedding_projection", "hidden_projection"):
        matrix = getattr(kept, name)
        assert isinstance(matrix, QuantizedWeight) and matrix.kind == type_name
        assert matrix.dequantize().equal(getattr(read, name))
    decoding = loaded(path, None)
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": None, "do_sample": False}
    ids = random_tokens(9)[None]
    expected = decoding.generate(ids, **options)
    assert decoding.generate(ids, assistant_model="mtp", **options).equal(expected)


def test_what_is_refused(tmp_path: Path) -> None:
    model, path = _model("qwen3_5_text"), tmp_path / "model.gguf"

    def check(message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            loaded(path)

    write_model(path, model.model)
    check("has no qwen35.nextn_predict_layers; expected 1, as mtp is True")
    write_mtp_model(path, model, count=2, **{"blk.5.attn_norm.weight": torch.ones(32)})
    check("has 2 for qwen35.nextn_predict_layers; expected 1, as mtp is True")
    write_mtp_model(path, model, replaced("nextn_predict_layers", 2))
    check("has 2 for qwen35.nextn_predict_layers; expected 1, as mtp is True")
    write_mtp_model(path, model, without={f"{BLOCK}nextn.eh_proj.weight"})
    check(f"has no tensor '{BLOCK}nextn.eh_proj.weight'; expected one")
    for name, part in (("embed_tokens", "embedding"), ("shared_head_head", "head")):
        own = f"{BLOCK}nextn.{name}.weight"
        write_mtp_model(path, model, **{own: torch.zeros(101, 32)})
        check(f"has {own}; expected none: the model's {part} is used")
    write_mtp_model(path, model, **{f"{BLOCK}attn_sinks.weight": torch.zeros(4)})
    check(f"'{BLOCK}attn_sinks.weight' one of them; expected none")
    write_mtp_model(path, model, **{f"{BLOCK}nextn.eh_proj.weight": torch.zeros(32, 32)})
    check(f"has {BLOCK}nextn.eh_proj.weight of shape [32, 32]; expected [32, 64]")
    write_model(path, model_of(random_config("llama", "plain")))
    check(f"{path} is of 'llama', and mtp is True; expected one of qwen35, qwen35moe, qwen3next")
    with pytest.raises(TypeError, match=r"from_pretrained: mtp is .*; expected a bool"):
        loaded(path, mtp=1)  # type: ignore[arg-type]
