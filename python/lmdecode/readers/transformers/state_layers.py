"""Reads transformers' layers with a state: convolutions, delta rule, Mamba-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.mixers import GatedDeltaRule, Mamba2, ShortConvolution
from lmdecode.readers.transformers.architecture import (
    ExpertModules,
    LayerModules,
    Rows,
    Scaled,
    SideBySide,
    Trunk,
    attention_layer,
    gated_ffn,
    joined_ffn,
    refused,
)

__all__ = [
    "falcon_h1_layer",
    "falcon_h1_trunk",
    "granitemoehybrid_layer",
    "lfm2_layer",
    "lfm2_trunk",
    "qwen3_5_layer",
    "qwen3_next_layer",
]


def lfm2_trunk(model: Any) -> Trunk:
    """Return the modules of LFM2."""
    body = model.model
    rotary = body.rotary_emb if hasattr(body, "rotary_emb") else body.pos_emb  # with experts
    return Trunk(body, body.embed_tokens, body.layers, body.embedding_norm, rotary=rotary)


def lfm2_layer(layer: Any) -> LayerModules:
    """Return the modules of a layer of LFM2, with attention or with a short convolution.

    A layer of LFM2-MoE may have experts.
    """
    ffn = layer.feed_forward
    if layer.is_attention_layer:
        attention = layer.self_attn
        modules = LayerModules(
            attention=attention,
            qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=attention.q_layernorm,
            key_norm=attention.k_layernorm,
            attention_out=attention.out_proj,
        )
    else:
        conv = layer.conv
        modules = LayerModules(
            attention=None,
            qkv=(conv.in_proj,),
            attention_out=conv.out_proj,
            mixer=ShortConvolution(conv.conv.in_channels, conv.conv_kernel_size),
            convolution=conv.conv,
        )
    modules = modules._replace(attention_norm=layer.operator_norm, ffn_norm=layer.ffn_norm)
    if hasattr(ffn, "experts"):
        choice_bias = (ffn, "expert_bias") if ffn.use_expert_bias else None
        return modules._replace(experts=ExpertModules(ffn.gate, ffn.experts, choice_bias))
    return modules._replace(ffn_gate=ffn.w1, ffn_up=ffn.w3, ffn_down=ffn.w2)


def _query_rows(heads: int, head_size: int, part: int) -> Tensor:
    """Return the rows of queries, part 0, or of the gate: they alternate by head."""
    rows = torch.arange(heads * 2 * head_size, device="cpu").view(heads, 2, head_size)
    return rows[:, part].flatten()


def _gated_attention(attention: Any) -> LayerModules:
    query, size = attention.q_proj, attention.head_dim
    heads = query.out_features // (2 * size)
    return LayerModules(
        attention=attention,
        qkv=(
            Rows(query, _query_rows(heads, size, 0)),
            attention.k_proj,
            attention.v_proj,
            Rows(query, _query_rows(heads, size, 1)),
        ),
        query_norm=attention.q_norm,
        key_norm=attention.k_norm,
        attention_out=attention.o_proj,
    )


def _delta_rule(module: Any, projections: tuple[Any, ...]) -> LayerModules:
    if module.activation not in ("silu", "swish"):
        raise refused(f"the activation of linear attention is {module.activation!r}; expected silu")
    return LayerModules(
        attention=None,
        qkv=projections,
        attention_out=module.out_proj,
        mixer=GatedDeltaRule(
            module.num_k_heads,
            module.num_v_heads,
            module.head_k_dim,
            module.head_v_dim,
            module.conv_kernel_size,
        ),
        convolution=module.conv1d,
        delta_rule=module,
    )


def _with_ffn(layer: Any, modules: LayerModules) -> LayerModules:
    ffn = layer.mlp
    if hasattr(ffn, "experts"):
        gate = ffn.shared_expert_gate
        modules = modules._replace(
            experts=ExpertModules(ffn.gate, ffn.experts, shared_gate=gate),
        )
        ffn = ffn.shared_expert
    return modules._replace(
        attention_norm=layer.input_layernorm,
        ffn_norm=layer.post_attention_layernorm,
        **gated_ffn(ffn),
    )


def qwen3_5_layer(layer: Any) -> LayerModules:
    """Return the modules of a layer of Qwen 3.5, with attention or with a gated delta rule."""
    if hasattr(layer, "self_attn"):
        return _with_ffn(layer, _gated_attention(layer.self_attn))
    delta = layer.linear_attn
    projections = (delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a)
    return _with_ffn(layer, _delta_rule(delta, projections))


def _part_rows(key_heads: int, sizes: list[int]) -> Tensor:
    """Return rows part by part of a projection that has all parts, of these sizes, by key head."""
    rows = torch.arange(key_heads * sum(sizes), device="cpu").view(key_heads, sum(sizes))
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])


def qwen3_next_layer(layer: Any) -> LayerModules:
    """Return the modules of a layer of Qwen 3 Next: Qwen 3.5's in another order."""
    if hasattr(layer, "self_attn"):
        return _with_ffn(layer, _gated_attention(layer.self_attn))
    delta = layer.linear_attn
    group = delta.num_v_heads // delta.num_k_heads
    values = group * delta.head_v_dim
    sizes = [delta.head_k_dim, delta.head_k_dim, values, values]
    projections = (
        Rows(delta.in_proj_qkvz, _part_rows(delta.num_k_heads, sizes)),
        Rows(delta.in_proj_ba, _part_rows(delta.num_k_heads, [group, group])),
    )
    return _with_ffn(layer, _delta_rule(delta, projections))


def _mamba2(module: Any) -> Mamba2:
    """Return the sizes of a module with Mamba-2."""
    if module.activation not in ("silu", "swish"):
        raise refused(f"the activation of Mamba-2 is {module.activation!r}; expected silu")
    least, most = module.time_step_limit
    return Mamba2(
        module.n_groups,
        module.num_heads,
        module.ssm_state_size,
        module.head_dim,
        module.conv_kernel_size,
        norm_first=bool(getattr(module.norm, "norm_before_gate", False)),
        least_step=float(least),
        most_step=float(most),
    )


def granitemoehybrid_layer(layer: Any) -> LayerModules:
    """Return the modules of a layer of Granite 4, with attention or with Mamba-2.

    Experts and a shared one follow, or a feed-forward layer alone.
    """
    if layer.mamba is None:
        modules = attention_layer(layer)
    else:
        mamba = layer.mamba
        modules = LayerModules(
            attention=None,
            attention_norm=layer.input_layernorm,
            qkv=(mamba.in_proj,),
            attention_out=mamba.out_proj,
            mixer=_mamba2(mamba),
            convolution=mamba.conv1d,
            delta_rule=mamba,
            ffn_norm=layer.post_attention_layernorm,
        )
    moe = layer.block_sparse_moe
    return modules._replace(
        **joined_ffn(layer.shared_mlp),
        experts=None if moe is None else ExpertModules(moe.router, moe.experts),
    )


def falcon_h1_trunk(model: Any) -> Trunk:
    """Return the modules of Falcon-H1."""
    body = model.model
    return Trunk(body, body.embed_tokens, body.layers, body.final_layernorm, rotary=body.rotary_emb)


def falcon_h1_layer(layer: Any) -> LayerModules:
    """Return the modules of a layer of Falcon-H1: Mamba-2 beside attention.

    Multipliers are folded into the weights.
    """
    attention, mamba, ffn = layer.self_attn, layer.mamba, layer.feed_forward
    mixer, given = _mamba2(mamba), layer.attention_in_multiplier
    keys = mixer.num_groups * mixer.key_size
    sizes = torch.tensor([mixer.mixed, mixer.mixed, keys, keys, mixer.num_heads], device="cpu")
    factors = torch.tensor(attention.config.ssm_multipliers, dtype=torch.float32, device="cpu")
    return LayerModules(
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=(
            Scaled(attention.q_proj, given),
            Scaled(attention.k_proj, given, attention.key_multiplier),
            Scaled(attention.v_proj, given),
            Scaled(mamba.in_proj, mamba.ssm_in_multiplier, factors.repeat_interleave(sizes)),
        ),
        attention_out=SideBySide(
            (
                Scaled(attention.o_proj, outputs=layer.attn_out_multiplier),
                Scaled(mamba.out_proj, outputs=layer.ssm_out_multiplier),
            )
        ),
        mixer=mixer,
        convolution=mamba.conv1d,
        delta_rule=mamba,
        ffn_norm=layer.pre_ff_layernorm,
        ffn_gate=Scaled(ffn.gate_proj, outputs=ffn.gate_multiplier),
        ffn_up=ffn.up_proj,
        ffn_down=Scaled(ffn.down_proj, outputs=ffn.down_multiplier),
    )
