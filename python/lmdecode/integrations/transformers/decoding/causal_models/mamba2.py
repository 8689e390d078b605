"""Modules of architectures with Mamba-2 layers."""

from __future__ import annotations

from typing import Any

import torch

from lmdecode.decoder.mixers import Mamba2
from lmdecode.integrations.transformers.decoding.causal_models.architecture import (
    ExpertModules,
    LayerModules,
    Scaled,
    SideBySide,
    Trunk,
    attention_layer,
    joined_ffn,
    refused,
)

__all__ = ["falcon_h1_layer", "falcon_h1_trunk", "granitemoehybrid_layer"]


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

    Behind it are experts and a shared one, or a feed-forward layer alone.
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
