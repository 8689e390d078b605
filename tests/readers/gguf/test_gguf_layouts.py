"""GGUF files of models of 2026: types of tensors, other layouts, layers that are left aside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.linear.quantized_weight import JoinedWeight, QuantizedWeight
from lmdecode.models.weights import ExpertMatrices
from lmdecode.readers.gguf.model import load_parts
from lmdecode.reference.causal import causal_logits
from tests.support.causal_models import model_of, random_config, random_tokens
from tests.support.gguf_checks import (
    OPTIONS,
    check_file_refused,
    check_missing,
    check_tokens,
    flattened,
    replaced,
)
from tests.support.gguf_files import gguf, quantized, tensors_of, write_model
from tests.support.mtp_gguf import further_block

# Rows of whole blocks of each type.
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_WIDE = {"hidden_size": 256, "intermediate_size": 256, **_EXPERTS}
_WIDE_DELTA = {
    **_WIDE, "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 256, "mlp_only_layers": [],
}  # fmt: skip
_WIDE_GEMMA = {
    **_WIDE, "head_dim": 64, "global_head_dim": 64, "hidden_size_per_layer_input": 256,
    "top_k_experts": 2, "vocab_size_per_layer_input": 101,
}  # fmt: skip
_WIDE_MAMBA = {
    "hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256,
    "mamba_d_head": 64, "mamba_d_state": 16, "num_local_experts": 3, "residual_multiplier": 1.0,
}  # fmt: skip
_WIDE_FALCON = {
    "hidden_size": 256, "intermediate_size": 256, "mamba_d_ssm": 256, "mamba_n_heads": 4,
    "mamba_d_head": 64, "projectors_bias": False,
}  # fmt: skip
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("norm behind the gate, biases", _WIDE_FALCON),
    "gemma4_text": ("experts, shared keys, inputs of layers", _WIDE_GEMMA),
    "granitemoehybrid": ("experts, multipliers", _WIDE_MAMBA),
    "lfm2_moe": ("plain", {**_WIDE, "num_dense_layers": 1}),
    "qwen3_5_moe_text": ("plain", _WIDE_DELTA),
    "qwen3_next": ("experts and dense layers", _WIDE_DELTA),
}
OF_DELTA_RULE = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def _wide(kind: str) -> Any:
    variant, more = WIDE[kind]
    return model_of(random_config(kind, variant, **more))


def _kinds(kind: str) -> Callable[[str], str]:
    """What llama-quantize makes of tensors: convolutions and routers stay what they are."""
    floats = ("conv", "ffn_gate_inp", "ssm_norm")
    ends = (".ssm_a", ".ssm_d")
    return lambda name: (
        "F32" if any(part in name for part in floats) or name.endswith(ends) else kind
    )


def _rounded(tensor: Tensor, kind: str) -> Tensor:
    """Return the values of a matrix that a file of another type has."""
    if kind == "F32":
        return tensor
    if kind in ("F16", "BF16"):
        return tensor.to(torch.float16 if kind == "F16" else torch.bfloat16).float()
    number = gguf.GGMLQuantizationType[kind]
    values = gguf.quants.dequantize(quantized(tensor.numpy(), kind), number)
    return torch.from_numpy(values).view(tensor.shape)


def _values(weight: Any) -> list[Tensor]:
    if isinstance(weight, ExpertMatrices):
        return [value for i in range(len(weight)) for value in _values(weight[i])]
    return [weight.float() if isinstance(weight, Tensor) else weight.dequantize()]


def _assert_equal(layer: Any, expected: Any) -> None:
    for name, value in expected._asdict().items():
        other = getattr(layer, name)
        assert (value is None) == (other is None), name
        if value is not None:
            for one, two in zip(_values(other), _values(value), strict=True):
                assert torch.equal(one, two), name


def _write_both(folder: Path, model: Any, kinds: Callable[[str], str]) -> tuple[Path, Path]:
    """Write a file with these types, and one of float32 with the same values."""
    write_model(folder / "blocks.gguf", model, kinds=kinds)
    rounded = {
        name: _rounded(tensor, kinds(name)) if tensor.dim() > 1 else tensor
        for name, tensor in tensors_of(model).items()
    }
    write_model(folder / "floats.gguf", model, **rounded)
    return folder / "blocks.gguf", folder / "floats.gguf"


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("kind", WIDE)
def test_values_of_each_type(kind: str, type_name: str, tmp_path: Path) -> None:
    """Weights are those of a file with the same values in float32, in blocks and as floats."""
    blocks, floats = _write_both(tmp_path, _wide(kind), _kinds(type_name))
    _, config, expected = load_parts(floats)
    for keeps_blocks in (False, True):
        _, same, weights = load_parts(blocks, keeps_blocks=keeps_blocks)
        assert same == config
        for layer, of_floats in zip(weights.layers, expected.layers, strict=True):
            _assert_equal(layer, of_floats)
    if type_name.startswith("Q"):
        last = weights.layers[1]
        assert isinstance(last.qkv, QuantizedWeight) and last.qkv.kind == type_name
        down = last.ffn_down if kind == "falcon_h1" else last.experts_down[2]
        assert isinstance(down, QuantizedWeight)
        assert isinstance(last.attention_out, QuantizedWeight)
    decoding = lmdecode.Decoding.from_pretrained(blocks, None)
    assert decoding.generate(random_tokens(9)[None], **OPTIONS).shape == (1, 29)


def test_projections_of_several_types(tmp_path: Path) -> None:
    """Queries to values have more bits than gates: rows of either stay in their blocks."""
    of_name = {"attn_qkv": "Q5_0", "attn_gate": "Q4_0", "ssm_ba": "Q8_0"}

    def kinds(name: str) -> str:
        return of_name.get(name.split(".")[-2], "F32")

    blocks, floats = _write_both(tmp_path, _wide("qwen3_next"), kinds)
    _, _, kept = load_parts(blocks, keeps_blocks=True)
    _, _, expected = load_parts(floats)
    _assert_equal(kept.layers[0], expected.layers[0])
    qkv = kept.layers[0].qkv
    assert isinstance(qkv, JoinedWeight)
    assert [part.kind for part in qkv.parts] == ["Q5_0", "Q4_0", "Q8_0"]
    lmdecode.Decoding.from_pretrained(blocks, None).generate(random_tokens(9)[None], **OPTIONS)


def _small(kind: str, **more: Any) -> Any:
    others = {
        "qwen3_next": "experts and dense layers",
        "gemma4_text": "experts, shared keys, inputs of layers",
    }
    variant = others.get(kind, "plain")
    some = {"mlp_only_layers": []} if kind == "qwen3_next" else {}
    return model_of(random_config(kind, variant, **some, **more))


def test_a_projection_as_transformers_has_it(tmp_path: Path) -> None:
    """As llama.cpp's first files of Qwen 3 Next have it."""
    model = _small("qwen3_next")
    merged = {
        f"blk.{parameter.split('.')[2]}.ssm_in.weight": value.detach()
        for parameter, value in model.named_parameters()
        if parameter.endswith("in_proj_qkvz.weight")
    }
    parts = {name.replace("ssm_in", part) for name in merged for part in ("attn_qkv", "attn_gate")}
    write_model(tmp_path / "model.gguf", model, without=parts, **merged)
    check_tokens(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "qwen3_next"])
def test_gates_and_others_of_experts_in_one_tensor(kind: str, tmp_path: Path) -> None:
    model = _small(kind)
    both = {
        f"blk.{parameter.split('.')[2]}.ffn_gate_up_exps.weight": value.detach()
        for parameter, value in model.named_parameters()
        if parameter.endswith("experts.gate_up_proj")
    }
    parts = {name.replace("gate_up", part) for name in both for part in ("gate", "up")}
    write_model(tmp_path / "model.gguf", model, without=parts, **both)
    check_tokens(tmp_path / "model.gguf", model)


def test_the_gate_of_a_shared_expert_as_a_vector(tmp_path: Path) -> None:
    model = _small("qwen3_5_moe_text")
    gates = flattened(model, "ffn_gate_inp_shexp.weight", 4)
    write_model(tmp_path / "model.gguf", model, **gates)
    check_tokens(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("kind", OF_DELTA_RULE)
def test_layers_by_an_interval(kind: str, tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        del writer.kv_data[0][f"{writer.arch}.attention.recurrent_layers"]
        writer.add_uint32(f"{writer.arch}.full_attention_interval", 2)

    types = ["linear_attention", "full_attention"] * 2
    model = _small(kind, layer_types=types)
    write_model(tmp_path / "model.gguf", model, change)
    check_tokens(tmp_path / "model.gguf", model)


@pytest.mark.parametrize("kind", OF_DELTA_RULE)
def test_layers_that_predict_further_tokens_are_left(kind: str, tmp_path: Path) -> None:
    """They are the last blocks: as a layer with attention, and more."""
    model = _small(kind)
    last = {
        name.replace("blk.3.", "blk.4."): tensor
        for name, tensor in tensors_of(model).items()
        if name.startswith("blk.3.")
    }
    size = model.config.hidden_size
    last |= {f"blk.4.nextn.{name}.weight": torch.ones(size)
             for name in ("enorm", "hnorm", "shared_head_norm")}  # fmt: skip
    last["blk.4.nextn.eh_proj.weight"] = torch.ones(size, 2 * size)
    write_model(tmp_path / "model.gguf", model, further_block, **last)
    check_tokens(tmp_path / "model.gguf", model)


Case = str | tuple[str, str]
EXPERTS = ("granitemoehybrid", "experts, multipliers")
DENSE = ("granitemoehybrid", "dense, attention last, rotary, biases")
FALCON = ("falcon_h1", "multipliers")
WITH_NORM = ("falcon_h1", "norm behind the gate, biases")


def _model(case: Case) -> Any:
    """Return the model of a case, or a small one of a type."""
    if isinstance(case, str):
        return _small(case)
    more = {DENSE: {"intermediate_size": 28}, WITH_NORM: {"projectors_bias": False}}
    return model_of(random_config(*case, **more.get(case, {})))


_HUGE = (1 << 31) - 32  # of which no list may be made; a multiple of all sizes here
BAD_ENTRIES: list[tuple[Case, str, Any, str]] = [
    ("gemma4_text", "attention.shared_kv_layers", _HUGE, "expected fewer than its 5 layers"),
    ("gemma4_text", "attention.shared_kv_layers", 5, "has 5 for gemma4.attention.shared_kv_layers"),
    ("gemma4_text", "embedding_length_per_layer_input", _HUGE, "of 50 columns; expected 5 layers"),
    ("lfm2_moe", "leading_dense_block_count", _HUGE, "expected at most 101, the largest size of"),
    ("qwen3_next", "ssm.inner_size", _HUGE, "for qwen3next.ssm.inner_size; expected at most"),
    ("qwen3_next", "ssm.time_step_rank", _HUGE, "for qwen3next.ssm.time_step_rank; expected at"),
    ("qwen3_next", "rope.dimension_count", _HUGE, "rope.dimension_count; expected at most"),
    ("qwen3_next", "attention.key_length", _HUGE, "attention.key_length; expected at most"),
    ("lfm2_moe", "expert_gating_func", 1, "expert_gating_func 'softmax'; expected 'sigmoid'"),
    ("lfm2_moe", "leading_dense_block_count", 2, "in the layers []; expected none in the first 2"),
    ("gemma4_text", "expert_used_count", 7, "has 7 experts of a token; expected at most 6"),
    ("lfm2_moe", "expert_used_count", 7, "has 7 experts of a token; expected at most 6"),
    ("qwen3_5_moe_text", "expert_count", 5, "of shape [6, 32]; expected [5, 32]"),
    ("qwen3_next", "nextn_predict_layers", 4, "expected fewer than its 4 layers"),
    ("qwen3_next", "ssm.group_count", 4, "blk.0.ssm_conv1d.weight of shape [64, 4]; expected ["),
    ("qwen3_next", "attention.key_length", 10, "attn_q.weight of shape [96, 32]; expected [80,"),
    (EXPERTS, "ssm.inner_size", 48, "has an ssm.inner_size 48; expected a multiple of its 32 fea"),
    (EXPERTS, "ssm.inner_size", 96,
     "blk.0.ssm_in.weight of 176 rows; expected 240, of 96 features"),
    (FALCON, "ssm.inner_size", _HUGE, "for falcon-h1.ssm.inner_size; expected at most 142, the la"),
    (EXPERTS, "ssm.time_step_rank", 7, "has 7 heads of Mamba-2; expected a divisor of 64"),
    (EXPERTS, "ssm.time_step_rank", 16,
     "blk.0.ssm_in.weight of 176 rows; expected 184, of 64 feat"),
    (FALCON, "ssm.time_step_rank", 0, "has 0 for falcon-h1.ssm.time_step_rank; expected one int"),
    (FALCON, "ssm.group_count", 4, "has 4 groups of its heads of Mamba-2; expected a divisor of 6"),
    (WITH_NORM, "ssm.group_count", 3,
     "of 142 rows; expected 162, of 48 features, 3 groups with sta"),
    (EXPERTS, "ssm.state_size", _HUGE,
     "granitehybrid.ssm.state_size; expected at most 176, the la"),
    (EXPERTS, "ssm.conv_kernel", _HUGE, "granitehybrid.ssm.conv_kernel; expected at most 176"),
    (EXPERTS, "ssm.state_size", 170,
     "ssm_in.weight of 176 rows; expected 816, of 64 features, 2 g"),
    (FALCON, "attention.key_length", _HUGE, "falcon-h1.attention.key_length; expected at most 142"),
    (FALCON, "feed_forward_length", _HUGE, "ffn_gate.weight of shape [44, 32]; expected [2147483"),
    (EXPERTS, "ssm.conv_kernel", 3, "ssm_conv1d.weight of shape [104, 4]; expected [104, 3]"),
    (EXPERTS, "attention.head_count_kv", [0, 0, 0], "has [] key heads in layers with attention"),
    (EXPERTS, "attention.head_count_kv", [2, 2, 0], "has no tensor 'blk.0.attn_q.weight'"),
    (EXPERTS, "attention.head_count_kv", [0, 2], "expected 3 ints of at least 0"),
    (EXPERTS, "feed_forward_length", 45, "ffn_gate_exps.weight of shape [6, 44, 32]; expected [6"),
    (EXPERTS, "expert_shared_feed_forward_length", 29,
     "shexp.weight of shape [28, 32]; expected ["),
    (EXPERTS, "expert_count", 0, "ffn_gate_shexp.weight of shape [28, 32]; expected [44, 32]"),
    (EXPERTS, "expert_count", 7, "ffn_gate_inp.weight of shape [6, 32]; expected [7, 32]"),
    (EXPERTS, "expert_used_count", 7, "has 7 experts of a token; expected at most 6"),
    (EXPERTS, "rope.scaling.finetuned", "yes", "rope.scaling.finetuned; expected True or False"),
    (DENSE, "rope.dimension_count", 4, "turns 4 of 8 features of a head; expected all of them"),
    (DENSE, "feed_forward_length", 29, "ffn_gate.weight of shape [28, 32]; expected [29, 32]"),
    (FALCON, "attention.key_length", 9, "has values of 8 features; expected keys', 9"),
    (FALCON, "attention.head_count_kv", 4, "attn_k.weight of shape [16, 32]; expected [32, 32]"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD_ENTRIES, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_entries_that_make_no_sense(case: tuple[Case, str, Any, str], tmp_path: Path) -> None:
    which, key, value, message = case
    write_model(tmp_path / "model.gguf", _model(which), replaced(key, value))
    check_file_refused(tmp_path / "model.gguf", message)


@pytest.mark.parametrize(
    ("which", "tensor"),
    [
        ("lfm2_moe", "blk.1.exp_probs_b.bias"),
        ("qwen3_next", "blk.0.attn_gate.weight"),
        ("qwen3_next", "blk.2.ssm_ba.weight"),
        ("qwen3_5_moe_text", "blk.3.ffn_up_shexp.weight"),
        (EXPERTS, "blk.0.ffn_gate_inp.weight"),
        (EXPERTS, "blk.2.ffn_down_shexp.weight"),
        (EXPERTS, "blk.2.ssm_d"),
        (DENSE, "blk.1.ffn_down.weight"),
        (FALCON, "blk.1.ssm_a"),
        (FALCON, "blk.0.ffn_norm"),
        (WITH_NORM, "blk.1.ssm_norm.weight"),
    ],
)
def test_a_tensor_that_is_missing(which: Case, tensor: str, tmp_path: Path) -> None:
    check_missing(tmp_path / "model.gguf", _model(which), tensor)


@pytest.mark.parametrize("case", [EXPERTS, DENSE, FALCON, WITH_NORM], ids=str)
def test_logits_are_those_of_the_model(case: tuple[str, str], tmp_path: Path) -> None:
    """Multipliers of logits and of keys have little or nothing to do with tokens."""
    model, tokens = _model(case), random_tokens(40)
    write_model(tmp_path / "model.gguf", model)
    _, config, weights = load_parts(tmp_path / "model.gguf")
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(
        causal_logits(config, weights, tokens), expected, atol=1e-4, rtol=1e-5
    )


def test_multipliers_are_in_the_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", _model(FALCON))
    model, config, _ = load_parts(tmp_path / "model.gguf")
    assert config.embedding_scale == config.logits_scale == 1.0
    own = model.config
    ones = (*own.mlp_multipliers, *own.ssm_multipliers, own.key_multiplier, own.ssm_in_multiplier,
            own.ssm_out_multiplier, own.attention_in_multiplier,
            own.attention_out_multiplier)  # fmt: skip
    assert set(ones) == {1.0}


def test_logits_of_a_tied_embedding_have_its_multiplier(tmp_path: Path) -> None:
    """As in llama.cpp: the file has one tensor for both."""
    case, more = ("falcon_h1", "norm before the gate, tied"), {"mamba_norm_before_gate": False}
    model, tokens = model_of(random_config(*case, **more)), random_tokens(30)
    write_model(tmp_path / "model.gguf", model)
    _, config, weights = load_parts(tmp_path / "model.gguf")
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    expected *= model.config.embedding_multiplier / model.config.lm_head_multiplier
    torch.testing.assert_close(
        causal_logits(config, weights, tokens), expected, atol=2e-4, rtol=1e-5
    )


@pytest.mark.parametrize("tells", [True, False])
def test_positions_unless_a_file_says_otherwise(tells: bool, tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        del writer.kv_data[0]["granitehybrid.rope.scaling.finetuned"]

    model = _model(EXPERTS if tells else DENSE)
    write_model(tmp_path / "model.gguf", model, *(() if tells else (change,)))
    check_tokens(tmp_path / "model.gguf", model)


def test_vectors_that_a_program_wrote_again(tmp_path: Path) -> None:
    """llama-quantize leaves out a first dimension of 1: that of a norm of one group."""
    model = _model(DENSE)
    norms = flattened(model, "ssm_norm.weight", 2)
    write_model(tmp_path / "model.gguf", model, **norms)
    check_tokens(tmp_path / "model.gguf", model)


OTHERS: list[tuple[tuple[str, str], dict[str, Tensor], str]] = [
    (EXPERTS, {"blk.0.ssm_a": torch.ones(8)}, "blk.0.ssm_a of shape [8]; expected [8, 1]"),
    (WITH_NORM, {"blk.0.ssm_norm.weight": torch.ones(48)}, "of shape [48]; expected [2, 24]"),
    (FALCON, {"blk.0.ssm_in.bias": torch.ones(142)}, "has 1 tensors that its architecture does"),
    (FALCON, {"blk.0.ssm_out.bias": torch.ones(32)}, "'blk.0.ssm_out.bias' one of them"),
]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: next(iter(case[1])))
def test_tensors_that_are_not_expected(
    case: tuple[tuple[str, str], dict[str, Tensor], str], tmp_path: Path
) -> None:
    which, more, message = case
    write_model(tmp_path / "model.gguf", _model(which), **more)
    check_file_refused(tmp_path / "model.gguf", message)


def test_a_norm_in_blocks(tmp_path: Path) -> None:
    model = _model(DENSE)
    kinds = {"ssm_norm": "Q8_0"}
    write_model(tmp_path / "m.gguf", model, kinds=lambda name: kinds.get(name.split(".")[-2]))
    with pytest.raises(ValueError, match=r"has blk\.0\.ssm_norm\.weight in blocks; expected floa"):
        lmdecode.Decoding.from_pretrained(tmp_path / "m.gguf")
