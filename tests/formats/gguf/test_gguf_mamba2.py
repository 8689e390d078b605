"""GGUF files with layers of Mamba-2: logits, other layouts, metadata that make no sense."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.formats.gguf.model import load_parts
from lmdecode.reference.causal import causal_logits
from tests.support.causal_models import model_of, random_config, random_tokens
from tests.support.gguf_checks import (
    check_file_refused,
    check_missing,
    check_tokens,
    flattened,
    replaced,
)
from tests.support.gguf_files import write_model

EXPERTS = ("granitemoehybrid", "experts, multipliers")
DENSE = ("granitemoehybrid", "dense, attention last, rotary, biases")
FALCON = ("falcon_h1", "multipliers")
WITH_NORM = ("falcon_h1", "norm behind the gate, biases")


def _model(case: tuple[str, str]) -> Any:
    more = {DENSE: {"intermediate_size": 28}, WITH_NORM: {"projectors_bias": False}}
    return model_of(random_config(*case, **more.get(case, {})))


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


_HUGE = (1 << 31) - 32  # a multiple of all sizes here
BAD_ENTRIES: list[tuple[tuple[str, str], str, Any, str]] = [
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


@pytest.mark.parametrize("case", BAD_ENTRIES, ids=lambda case: f"{case[0][0]} {case[1]} {case[2]}")
def test_entries_that_make_no_sense(
    case: tuple[tuple[str, str], str, Any, str], tmp_path: Path
) -> None:
    which, key, value, message = case
    write_model(tmp_path / "model.gguf", _model(which), replaced(key, value))
    check_file_refused(tmp_path / "model.gguf", message)


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        (EXPERTS, "blk.0.ffn_gate_inp.weight"),
        (EXPERTS, "blk.2.ffn_down_shexp.weight"),
        (EXPERTS, "blk.2.ssm_d"),
        (DENSE, "blk.1.ffn_down.weight"),
        (FALCON, "blk.1.ssm_a"),
        (FALCON, "blk.0.ffn_norm"),
        (WITH_NORM, "blk.1.ssm_norm.weight"),
    ],
)
def test_a_tensor_that_is_missing(case: tuple[str, str], tensor: str, tmp_path: Path) -> None:
    check_missing(tmp_path / "model.gguf", _model(case), tensor)


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
