"""The table of architectures, with the modules and switches of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmdecode.readers.transformers.architecture import (
    Architecture,
    ExpertModules,
    LayerModules,
    PerLayerModules,
    PerLayerTrunk,
    Trunk,
    attention_layer,
    gated_ffn,
    joined_ffn,
    refused,
    trunk_of,
)
from lmdecode.readers.transformers.state_layers import (
    falcon_h1_layer,
    falcon_h1_trunk,
    granitemoehybrid_layer,
    lfm2_layer,
    lfm2_trunk,
    qwen3_5_layer,
    qwen3_next_layer,
)

__all__ = ["CAUSAL_MODEL_TYPES"]


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


def gemma4_trunk(model: Any) -> Trunk:
    """Return the modules of a text model."""
    return _gemma4_trunk_of(model.model)


def gemma4_text_part(model: Any) -> Trunk:
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


def gemma4_layer(layer: Any) -> LayerModules:
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


def gemma4_experts(config: Any) -> dict[str, Any]:
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
    gemma4_trunk,
    gemma4_layer,
    activation="hidden_activation",
    value_norm=True,
    windows="layer_types",
    embedding_scaled=True,
    logits_softcap="final_logit_softcapping",
    experts=gemma4_experts,
)

_LFM2 = Architecture(lfm2_trunk, lfm2_layer, norm_epsilon="norm_eps", fixed_activation="silu")
_QWEN3_5 = Architecture(_trunk, qwen3_5_layer, gamma_plus_one=True, attention_gate=True)
_QWEN3_5_MOE = replace(_QWEN3_5, experts=_normalized_experts)

CAUSAL_MODEL_TYPES: dict[str, Architecture] = {
    "falcon_h1": Architecture(
        falcon_h1_trunk,
        falcon_h1_layer,
        embedding_multiplier="embedding_multiplier",
        logits_multiplier="lm_head_multiplier",
    ),
    "gemma2": replace(_GEMMA, attention_softcap="attn_logit_softcapping"),
    # transformers' Gemma 3 does not apply attn_logit_softcapping.
    "gemma3_text": replace(_GEMMA, layer=_gemma3_layer),
    # Text only; transformers' Gemma 3 with images does not cap its logits.
    "gemma3": replace(_GEMMA, trunk=_text_part, layer=_gemma3_layer, logits_softcap=None),
    "gemma4_text": _GEMMA4,
    "gemma4": replace(_GEMMA4, trunk=gemma4_text_part),  # text only
    "gpt2": Architecture(
        _gpt2_trunk,
        _gpt2_layer,
        norm="layer_norm",
        norm_epsilon="layer_norm_epsilon",
        activation="activation_function",
        must_be_off=("add_cross_attention",),
    ),
    "gpt_oss": Architecture(
        _trunk, _gpt_oss_layer, windows="layer_types", experts=_gpt_oss_experts
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, layer=_granitemoe_layer, experts=_chosen_experts),
    "granitemoehybrid": replace(
        _GRANITE,
        layer=granitemoehybrid_layer,
        experts=_chosen_experts,
    ),
    "granitemoeshared": replace(_GRANITE, layer=_granitemoeshared_layer, experts=_chosen_experts),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, experts=_sigmoid_experts),
    "llama": Architecture(_trunk, _llama_layer),
    "mistral": Architecture(_trunk, _llama_layer, windows="sliding_window"),
    "olmo2": Architecture(_trunk, _olmo2_layer),
    "olmoe": Architecture(
        _trunk,
        lambda layer: _with_head_norms(
            _experts_layer(layer, ExpertModules(layer.mlp.gate, layer.mlp.experts))
        ),
        experts=_softmax_experts,
        must_be_off=("clip_qkv",),
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
    "qwen3_next": replace(_QWEN3_5, layer=qwen3_next_layer, experts=_softmax_experts),
    "smollm3": Architecture(
        _trunk, _llama_layer, windows="layer_types", layers_without_positions=True
    ),
}
