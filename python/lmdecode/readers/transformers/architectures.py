"""The tables of architectures, decoder-only and of an encoder and a decoder: modules, switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmdecode.models.mixers import GatedDeltaRule, Mamba2, ShortConvolution
from lmdecode.readers.transformers.architecture import (
    Architecture,
    EncoderDecoder,
    ExpertModules,
    LayerModules,
    PerLayerModules,
    PerLayerTrunk,
    Rows,
    Scaled,
    SideBySide,
    Trunk,
    attention_layer,
    gated_ffn,
    joined_ffn,
    refused,
    trunk_of,
)

__all__ = ["CAUSAL_MODEL_TYPES", "ENCODER_DECODER_TYPES"]


def _gemma4_trunk_of(body: Any) -> Trunk:
    config = body.config
    if config.use_bidirectional_attention == "all":
        raise refused("use_bidirectional_attention is 'all'; expected None or 'vision'")
    trunk = trunk_of(body)
    if not config.hidden_size_per_layer_input:
        return trunk
    embedding = body.embed_tokens_per_layer
    rows, expected = embedding.weight.shape[0], body.embed_tokens.weight.shape[0]
    if rows != expected:
        raise refused(f"vocab_size_per_layer_input is {rows}; expected {expected}, as vocab_size")
    per_layer = PerLayerTrunk(
        embedding,
        body.per_layer_model_projection,
        body.per_layer_projection_norm,
        body.per_layer_model_projection_scale,
        body.per_layer_input_scale,
    )
    return trunk._replace(per_layer=per_layer)


def _gemma4_trunk(model: Any) -> Trunk:
    """Return the modules of a text model."""
    return _gemma4_trunk_of(model.model)


def _gemma4_text_part(model: Any) -> Trunk:
    """Return the text modules of a model that also reads images and sounds."""
    return _gemma4_trunk_of(model.model.language_model)


def _shared_keys(layer: Any) -> int | None:
    """Return the layer that shares its keys: the last one of the same type with its own."""
    if not layer.self_attn.is_kv_shared_layer:
        return None
    config = layer.config
    first = config.num_hidden_layers - config.num_kv_shared_layers
    kind = config.layer_types[layer.layer_idx]
    return max(i for i in range(first) if config.layer_types[i] == kind)


def _gemma4_layer(layer: Any) -> LayerModules:
    """Return the modules of a layer."""
    attention, shared_keys = layer.self_attn, _shared_keys(layer)
    projections, key_norm = (attention.q_proj,), None
    keys_are_values = False
    if shared_keys is None:
        keys_are_values = attention.v_proj is None
        values = () if keys_are_values else (attention.v_proj,)
        projections = (attention.q_proj, attention.k_proj, *values)
        key_norm = attention.k_norm
    modules = LayerModules(
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=projections,
        query_norm=attention.q_norm,
        key_norm=key_norm,
        attention_out=attention.o_proj,
        attention_out_norm=layer.post_attention_layernorm,
        ffn_norm=layer.pre_feedforward_layernorm,
        **gated_ffn(layer.mlp),
        ffn_out_norm=layer.post_feedforward_layernorm,
        shared_keys=shared_keys,
        keys_are_values=keys_are_values,
        scale=(layer, "layer_scalar"),
    )
    if layer.hidden_size_per_layer_input:
        gate, out = layer.per_layer_input_gate, layer.per_layer_projection
        per_layer = PerLayerModules(gate, out)
        modules = modules._replace(
            per_layer=per_layer, per_layer_out_norm=layer.post_per_layer_input_norm
        )
    if not layer.enable_moe_block:
        return modules
    router = layer.router
    return modules._replace(
        experts=ExpertModules(
            router.proj,
            layer.experts,
            router_norm=(router, "scale"),
            router_norm_factor=router.scalar_root_size,
            scales=(router, "per_expert_scale"),
        ),
        experts_norm=layer.pre_feedforward_layernorm_2,
        experts_out_norm=layer.post_feedforward_layernorm_2,
        shared_out_norm=layer.post_feedforward_layernorm_1,
    )


def _gemma4_experts(config: Any) -> dict[str, Any]:
    """Return the arguments of ``ExpertsConfig``."""
    return {
        "num_experts": config.num_experts,
        "num_chosen": config.top_k_experts,
        "router": "softmax",
        "normalized": True,
    }


def _trunk(model: Any) -> Trunk:
    return trunk_of(model.model)


def _text_part(model: Any) -> Trunk:
    return trunk_of(model.model.language_model)


def _gpt2_trunk(model: Any) -> Trunk:
    body = model.transformer
    return Trunk(body, body.wte, body.h, body.ln_f, positions=body.wpe)


def _llama_layer(layer: Any) -> LayerModules:
    return attention_layer(layer)._replace(**gated_ffn(layer.mlp))


def _with_head_norms(modules: LayerModules) -> LayerModules:
    attention = modules.attention
    return modules._replace(query_norm=attention.q_norm, key_norm=attention.k_norm)


def _qwen3_layer(layer: Any) -> LayerModules:
    return _with_head_norms(_llama_layer(layer))


def _olmo2_layer(layer: Any) -> LayerModules:
    attention = layer.self_attn
    return LayerModules(
        attention=attention,
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=attention.q_norm,
        key_norm=attention.k_norm,
        attention_out=attention.o_proj,
        attention_out_norm=layer.post_attention_layernorm,
        **gated_ffn(layer.mlp),
        ffn_out_norm=layer.post_feedforward_layernorm,
    )


def _gemma2_layer(layer: Any) -> LayerModules:
    return _llama_layer(layer)._replace(
        attention_out_norm=layer.post_attention_layernorm,
        ffn_norm=layer.pre_feedforward_layernorm,
        ffn_out_norm=layer.post_feedforward_layernorm,
    )


def _gemma3_layer(layer: Any) -> LayerModules:
    return _with_head_norms(_gemma2_layer(layer))


def _phi3_layer(layer: Any) -> LayerModules:
    attention, ffn = layer.self_attn, layer.mlp
    return LayerModules(
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=(attention.qkv_proj,),
        attention_out=attention.o_proj,
        ffn_norm=layer.post_attention_layernorm,
        ffn_gate=ffn.gate_up_proj,
        ffn_up=ffn.gate_up_proj,
        ffn_down=ffn.down_proj,
    )


def _gpt2_layer(layer: Any) -> LayerModules:
    return LayerModules(
        attention=layer.attn,
        attention_norm=layer.ln_1,
        qkv=(layer.attn.c_attn,),
        attention_out=layer.attn.c_proj,
        ffn_norm=layer.ln_2,
        ffn_gate=None,
        ffn_up=layer.mlp.c_fc,
        ffn_down=layer.mlp.c_proj,
    )


def _smollm3_layer(layer: Any) -> LayerModules:
    return _llama_layer(layer)._replace(is_turned=bool(layer.self_attn.use_rope))


# --- Feed-forward layers beside attention ---------------------------------------------------------


def _pairs_apart(projection: Any, head_size: int) -> Rows:
    """Return a projection whose heads have pairs of features side by side: in halves."""
    rows = torch.arange(projection.out_features, device="cpu").view(-1, head_size // 2, 2)
    return Rows(projection, rows.transpose(1, 2).flatten())


def _cohere_layer(layer: Any) -> LayerModules:
    attention = layer.self_attn
    return LayerModules(
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=(
            _pairs_apart(attention.q_proj, attention.head_dim),
            _pairs_apart(attention.k_proj, attention.head_dim),
            attention.v_proj,
        ),
        attention_out=attention.o_proj,
        ffn_norm=layer.input_layernorm,
        **gated_ffn(layer.mlp),
        ffn_beside=True,
    )


def _cohere2_layer(layer: Any) -> LayerModules:
    is_turned = layer.self_attn.sliding_window is not None
    return _cohere_layer(layer)._replace(is_turned=is_turned)


def _phi_layer(layer: Any) -> LayerModules:
    attention = layer.self_attn
    return LayerModules(
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        attention_out=attention.dense,
        ffn_norm=layer.input_layernorm,
        ffn_up=layer.mlp.fc1,
        ffn_down=layer.mlp.fc2,
        ffn_beside=True,
    )


def _gpt_neox_trunk(model: Any) -> Trunk:
    body = model.gpt_neox
    return Trunk(body, body.embed_in, body.layers, body.final_layer_norm, rotary=body.rotary_emb)


def _gpt_neox_layer(layer: Any) -> LayerModules:
    attention, size = layer.attention, layer.attention.head_size
    heads = attention.query_key_value.out_features // (3 * size)
    return LayerModules(
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=(Rows(attention.query_key_value, _part_rows(heads, [size] * 3)),),
        attention_out=attention.dense,
        ffn_norm=layer.post_attention_layernorm,
        ffn_up=layer.mlp.dense_h_to_4h,
        ffn_down=layer.mlp.dense_4h_to_h,
        ffn_beside=layer.use_parallel_residual,
    )


# --- Layers with experts --------------------------------------------------------------------------


def _experts_layer(layer: Any, experts: ExpertModules) -> LayerModules:
    return attention_layer(layer)._replace(experts=experts)


def _qwen3_moe_layer(layer: Any) -> LayerModules:
    if not hasattr(layer.mlp, "experts"):
        return _qwen3_layer(layer)
    experts = ExpertModules(layer.mlp.gate, layer.mlp.experts)
    return _with_head_norms(_experts_layer(layer, experts))


def _gpt_oss_layer(layer: Any) -> LayerModules:
    experts = ExpertModules(layer.mlp.router, layer.mlp.experts, is_interleaved=True)
    return _experts_layer(layer, experts)._replace(sinks=True)


def _granitemoe_layer(layer: Any) -> LayerModules:
    moe = layer.block_sparse_moe
    return _experts_layer(layer, ExpertModules(moe.router, moe.experts))


def _granitemoeshared_layer(layer: Any) -> LayerModules:
    if layer.shared_mlp is None:
        return _granitemoe_layer(layer)
    return _granitemoe_layer(layer)._replace(**joined_ffn(layer.shared_mlp))


# --- Layers with a state: convolutions, delta rule, Mamba-2 ---------------------------------------


def _lfm2_trunk(model: Any) -> Trunk:
    """Return the modules of LFM2."""
    body = model.model
    rotary = body.rotary_emb if hasattr(body, "rotary_emb") else body.pos_emb  # with experts
    return Trunk(body, body.embed_tokens, body.layers, body.embedding_norm, rotary=rotary)


def _lfm2_layer(layer: Any) -> LayerModules:
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


def _qwen3_5_layer(layer: Any) -> LayerModules:
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


def _qwen3_next_layer(layer: Any) -> LayerModules:
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


def _granitemoehybrid_layer(layer: Any) -> LayerModules:
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


def _final_layernorm_trunk(model: Any) -> Trunk:
    """Return the modules of Falcon-H1, or of Phi."""
    body = model.model
    return Trunk(body, body.embed_tokens, body.layers, body.final_layernorm, rotary=body.rotary_emb)


def _falcon_h1_layer(layer: Any) -> LayerModules:
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


# --- The tables -----------------------------------------------------------------------------------


def _softmax_experts(config: Any) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_chosen": config.num_experts_per_tok,
        "router": "softmax",
        "normalized": bool(config.norm_topk_prob),
    }


def _chosen_experts(config: Any) -> dict[str, Any]:
    return {
        "num_experts": config.num_local_experts,
        "num_chosen": config.num_experts_per_tok,
        "router": "softmax_of_chosen",
    }


def _gpt_oss_experts(config: Any) -> dict[str, Any]:
    return {**_chosen_experts(config), "alpha": config.swiglu_alpha, "limit": config.swiglu_limit}


def _normalized_experts(config: Any) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "num_chosen": config.num_experts_per_tok,
        "router": "softmax",
        "normalized": True,
    }


def _sigmoid_experts(config: Any) -> dict[str, Any]:
    return {
        **_softmax_experts(config),
        "router": "sigmoid",
        "epsilon": 1e-6,
        "scale": config.routed_scaling_factor,
    }


_GRANITE = Architecture(
    _trunk,
    _llama_layer,
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    logits_divisor="logits_scaling",
)
_GEMMA = Architecture(
    _trunk,
    _gemma2_layer,
    gamma_plus_one=True,
    activation="hidden_activation",
    windows="layer_types",
    embedding_scaled=True,
    logits_softcap="final_logit_softcapping",
    must_be_off=("use_bidirectional_attention",),
)
_GEMMA4 = Architecture(
    _gemma4_trunk,
    _gemma4_layer,
    activation="hidden_activation",
    value_norm=True,
    windows="layer_types",
    embedding_scaled=True,
    logits_softcap="final_logit_softcapping",
    experts=_gemma4_experts,
)

_COHERE = Architecture(
    _trunk,
    _cohere_layer,
    norm="layer_norm",
    norm_epsilon="layer_norm_eps",
    logits_multiplier="logit_scale",
    must_be_off=("use_qk_norm",),
)
_LFM2 = Architecture(_lfm2_trunk, _lfm2_layer, norm_epsilon="norm_eps", fixed_activation="silu")
_QWEN3_5 = Architecture(_trunk, _qwen3_5_layer, gamma_plus_one=True, attention_gate=True)
_QWEN3_5_MOE = replace(_QWEN3_5, experts=_normalized_experts)

CAUSAL_MODEL_TYPES: dict[str, Architecture] = {
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, layer=_cohere2_layer, windows="layer_types"),
    "falcon_h1": Architecture(
        _final_layernorm_trunk,
        _falcon_h1_layer,
        embedding_multiplier="embedding_multiplier",
        logits_multiplier="lm_head_multiplier",
    ),
    "gemma2": replace(_GEMMA, attention_softcap="attn_logit_softcapping"),
    # transformers' Gemma 3 does not apply attn_logit_softcapping.
    "gemma3_text": replace(_GEMMA, layer=_gemma3_layer),
    # Text only; transformers' Gemma 3 with images does not cap its logits.
    "gemma3": replace(_GEMMA, trunk=_text_part, layer=_gemma3_layer, logits_softcap=None),
    "gemma4_text": _GEMMA4,
    "gemma4": replace(_GEMMA4, trunk=_gemma4_text_part),  # text only
    "gpt2": Architecture(
        _gpt2_trunk,
        _gpt2_layer,
        norm="layer_norm",
        norm_epsilon="layer_norm_epsilon",
        activation="activation_function",
        must_be_off=("add_cross_attention",),
    ),
    "gpt_neox": Architecture(
        _gpt_neox_trunk, _gpt_neox_layer, norm="layer_norm", norm_epsilon="layer_norm_eps"
    ),
    "gpt_oss": Architecture(
        _trunk, _gpt_oss_layer, windows="layer_types", experts=_gpt_oss_experts
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, layer=_granitemoe_layer, experts=_chosen_experts),
    "granitemoehybrid": replace(
        _GRANITE,
        layer=_granitemoehybrid_layer,
        experts=_chosen_experts,
    ),
    "granitemoeshared": replace(_GRANITE, layer=_granitemoeshared_layer, experts=_chosen_experts),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, experts=_sigmoid_experts),
    "llama": Architecture(_trunk, _llama_layer),
    "mistral": Architecture(_trunk, _llama_layer, windows="sliding_window"),
    "olmo2": Architecture(_trunk, _olmo2_layer),
    "olmo3": Architecture(_trunk, _olmo2_layer, windows="layer_types"),
    "olmoe": Architecture(
        _trunk,
        lambda layer: _with_head_norms(
            _experts_layer(layer, ExpertModules(layer.mlp.gate, layer.mlp.experts))
        ),
        experts=_softmax_experts,
        must_be_off=("clip_qkv",),
    ),
    "phi": Architecture(
        _final_layernorm_trunk,
        _phi_layer,
        norm="layer_norm",
        norm_epsilon="layer_norm_eps",
        must_be_off=("qk_layernorm",),
    ),
    "phi3": Architecture(_trunk, _phi3_layer, windows="sliding_window"),
    "qwen2": Architecture(_trunk, _llama_layer, windows="layer_types"),
    "qwen3": Architecture(_trunk, _qwen3_layer, windows="layer_types"),
    # Text only.
    "qwen3_5": replace(_QWEN3_5, trunk=_text_part),
    "qwen3_5_moe": replace(_QWEN3_5_MOE, trunk=_text_part),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": Architecture(
        _trunk, _qwen3_moe_layer, windows="sliding_window", experts=_softmax_experts
    ),
    "qwen3_next": replace(_QWEN3_5, layer=_qwen3_next_layer, experts=_softmax_experts),
    "smollm3": Architecture(_trunk, _smollm3_layer, windows="layer_types"),
}

_T5 = EncoderDecoder(is_t5=True)

ENCODER_DECODER_TYPES: dict[str, EncoderDecoder] = {
    "bart": EncoderDecoder(norm_first=False, position_offset=lambda table: table.offset),
    # The row of padding is zeros; position 0 follows.
    "m2m_100": EncoderDecoder(
        position_offset=lambda table: table.padding_idx + 1, skips_padding=True
    ),
    "marian": EncoderDecoder(norm_first=False),
    "mbart": EncoderDecoder(position_offset=lambda table: table.offset),
    "mt5": _T5,
    "pegasus": EncoderDecoder(),
    "t5": _T5,
    "umt5": _T5,
    # transformers' Whisper does not apply scale_embedding.
    "whisper": EncoderDecoder(scaled_embedding=False, reads_tokens=False),
}
