"""Configs of transformers for GGUF files with layers that keep a state."""

from __future__ import annotations

from typing import Any

from lmdecode.readers.gguf.common_config import (
    common,
    expert_counts,
    expert_size,
    has_query_bias,
    head_size_of,
    layers_without_experts,
    plain_rope,
)
from lmdecode.readers.gguf.metadata import Facts, refused

__all__ = [
    "falcon_h1",
    "granite_scales",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "qwen3next",
    "qwen35",
    "qwen35moe",
]


_GATINGS = {1: "softmax", 2: "sigmoid", 3: "softmax of those chosen"}  # of expert_gating_func


def key_heads_of(facts: Facts, layers: int) -> tuple[list[int], int]:
    """Return the key heads of each layer, 0 without attention, and those of layers with it."""
    key_heads = facts.counts("attention.head_count_kv", layers)
    if len(some := {heads for heads in key_heads if heads}) != 1:
        raise refused(
            facts.file,
            f"has {sorted(some)} key heads in layers with attention; expected the same in all",
        )
    return key_heads, some.pop()


def _convolutions(facts: Facts) -> dict[str, Any]:
    """Return what both kinds of LFM2 have; layers without key heads are convolutions."""
    if facts.has("attention.sliding_window"):
        raise refused(
            facts.file, f"has an attention.sliding_window; expected none of {facts.architecture!r}"
        )
    layers = facts.count("block_count")
    key_heads, heads = key_heads_of(facts, layers)
    entries = common(facts)
    size = head_size_of(facts, entries["hidden_size"] // entries["num_attention_heads"])
    return {
        **entries,
        "head_dim": size,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if some else "conv" for some in key_heads],
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": facts.size("shortconv.l_cache"),
        "conv_bias": False,
        "rope_parameters": plain_rope(facts, size),
    }


def lfm2(facts: Facts) -> dict[str, Any]:
    """Return the config entries of LFM2."""
    return {
        **_convolutions(facts),
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,  # the file has the size that was adjusted
    }


def lfm2moe(facts: Facts) -> dict[str, Any]:
    """Return the config entries of LFM2 with experts, after some layers without."""
    gating = facts.count("expert_gating_func", least=0)
    if (name := _GATINGS.get(gating, f"of number {gating}")) != "sigmoid":
        raise refused(facts.file, f"has an expert_gating_func {name!r}; expected 'sigmoid'")
    entries = _convolutions(facts)
    layers = entries["num_hidden_layers"]
    dense = facts.size("leading_dense_block_count", 0, least=0)
    if (without := layers_without_experts(facts, layers)) != list(range(dense)):
        raise refused(
            facts.file,
            f"has no experts in the layers {without}; expected none in the first {dense}",
        )
    return {
        **entries,
        **expert_counts(facts),
        "model_type": "lfm2_moe",
        "moe_intermediate_size": expert_size(facts),
        "num_dense_layers": dense,
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in facts.file.tensors),
        "norm_topk_prob": True,  # in llama.cpp, too, whatever the file
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }


def _delta_rules(facts: Facts) -> dict[str, Any]:
    """Return what Qwen 3.5 and Qwen 3 Next have; layers that predict further are left."""
    head_size, blocks = facts.size("attention.key_length"), facts.count("block_count")
    layers = blocks - (further := facts.count("nextn_predict_layers", 0, least=0))
    if layers < 1:
        raise refused(
            facts.file,
            f"has {further} for {facts.architecture}.nextn_predict_layers; expected fewer than "
            f"its {blocks} layers",
        )
    if facts.has("attention.recurrent_layers"):
        recurrent = facts.counts("attention.recurrent_layers", blocks)[:layers]
    else:
        interval = facts.count("full_attention_interval", 4)
        recurrent = [int((layer + 1) % interval != 0) for layer in range(layers)]
    heads = facts.size("ssm.time_step_rank")
    turned = facts.size("rope.dimension_count", head_size)
    return {
        **common(facts),
        "num_hidden_layers": layers,
        "head_dim": head_size,
        "num_key_value_heads": facts.size("attention.head_count_kv"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["linear_attention" if r else "full_attention" for r in recurrent],
        "linear_conv_kernel_dim": facts.size("ssm.conv_kernel"),
        "linear_key_head_dim": facts.size("ssm.state_size"),
        "linear_value_head_dim": facts.size("ssm.inner_size") // heads,
        "linear_num_key_heads": facts.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        # A text alone has one position where an image has three: sections change nothing.
        "rope_parameters": {**plain_rope(facts), "partial_rotary_factor": turned / head_size},
    }


def qwen35(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Qwen 3.5's text."""
    return {
        **_delta_rules(facts),
        "model_type": "qwen3_5_text",
        "intermediate_size": facts.count("feed_forward_length"),
    }


def _shared_and_routed(facts: Facts) -> dict[str, Any]:
    return {
        **expert_counts(facts),
        "moe_intermediate_size": expert_size(facts),
        "shared_expert_intermediate_size": expert_size(facts, "shexp"),
    }


def qwen35moe(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Qwen 3.5's text with experts."""
    return {
        **_delta_rules(facts),
        **_shared_and_routed(facts),
        "model_type": "qwen3_5_moe_text",
    }


def qwen3next(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Qwen 3 Next."""
    return {
        **_delta_rules(facts),
        **_shared_and_routed(facts),
        "model_type": "qwen3_next",
        "intermediate_size": facts.count("feed_forward_length", 1),
        "norm_topk_prob": True,  # in llama.cpp, too, whatever the file
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def granite_scales(facts: Facts, head_size: int) -> dict[str, float]:
    """Return the factors that all kinds of Granite have."""
    return {
        "attention_multiplier": facts.number("attention.scale", head_size**-0.5),
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def _any(facts: Facts, ending: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(ending) for name in facts.file.tensors)


def _sizes(facts: Facts) -> dict[str, int]:
    """Return the sizes of Mamba-2: rows of its projection must be what they say.

    Else products of large ones would be a vector of their size in a model without weights.
    """
    inner, heads = facts.size("ssm.inner_size"), facts.size("ssm.time_step_rank")
    groups, state = facts.size("ssm.group_count"), facts.size("ssm.state_size")
    for whole, part, what in (
        (inner, heads, "heads of Mamba-2"),
        (heads, groups, "groups of its heads of Mamba-2"),
    ):
        if whole % part:
            raise refused(facts.file, f"has {part} {what}; expected a divisor of {whole}")
    name = facts.of_first_layer("ssm_in.weight")
    expected = 2 * (inner + groups * state) + heads
    if (rows := facts.shape(name)[0]) != expected:
        raise refused(
            facts.file,
            f"has {name} of {rows} rows; expected {expected}, of {inner} features, {groups} groups "
            f"with states of {state}, and {heads} heads",
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
    }


def _common(facts: Facts) -> dict[str, Any]:
    """Return what both models have: sizes, and heads of attention and of Mamba-2."""
    entries = common(facts)
    size, heads = entries["hidden_size"], entries["num_attention_heads"]
    return {
        **entries,
        "num_hidden_layers": facts.count("block_count"),
        "head_dim": head_size_of(facts, max(1, size // heads)),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": has_query_bias(facts),
        **_sizes(facts),
        "mamba_d_conv": facts.size("ssm.conv_kernel"),
        "mamba_conv_bias": _any(facts, ".ssm_conv1d.bias"),
        "mamba_proj_bias": False,
    }


def granitehybrid(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Granite 4; layers without key heads are Mamba-2."""
    size, inner = facts.count("embedding_length"), facts.size("ssm.inner_size")
    if inner % size:
        raise refused(
            facts.file, f"has an ssm.inner_size {inner}; expected a multiple of its {size} features"
        )
    entries = _common(facts)
    key_heads, heads = key_heads_of(facts, entries["num_hidden_layers"])
    rope: dict[str, Any] = {"rope_parameters": plain_rope(facts, entries["head_dim"])}
    turns = facts.flag("rope.scaling.finetuned", True)  # llama.cpp's switch of positions
    rope["position_embedding_type"] = "rope" if turns else None
    inner_features = facts.count("feed_forward_length")
    ffn: dict[str, Any] = {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": inner_features,
    }
    if facts.count("expert_count", 0, least=0):
        ffn = {
            **expert_counts(facts, "num_local_experts"),
            "shared_intermediate_size": facts.count("expert_shared_feed_forward_length"),
        }
    return {
        **entries,
        **rope,
        **ffn,
        **granite_scales(facts, entries["head_dim"]),
        "model_type": "granitemoehybrid",
        "intermediate_size": inner_features,
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if some else "linear_attention" for some in key_heads],
        "mamba_expand": inner // size,
    }


def falcon_h1(facts: Facts) -> dict[str, Any]:
    """Return the config entries of Falcon-H1; its multipliers are in the weights: all are 1."""
    entries = _common(facts)
    return {
        **entries,
        "model_type": "falcon_h1",
        "intermediate_size": facts.count("feed_forward_length"),
        "num_key_value_heads": facts.size("attention.head_count_kv"),
        "mlp_bias": _any(facts, ".ffn_up.bias"),
        "mamba_d_ssm": facts.size("ssm.inner_size"),
        "mamba_rms_norm": _any(facts, ".ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # in llama.cpp, too, whatever the model
        "projectors_bias": False,
        "rope_parameters": plain_rope(facts, entries["head_dim"]),
    }
