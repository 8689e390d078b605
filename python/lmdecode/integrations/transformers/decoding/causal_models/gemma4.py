"""Modules of Gemma 4: keys that layers share, inputs of layers, experts beside a dense layer."""

from __future__ import annotations

from typing import Any

from lmdecode.integrations.transformers.decoding.causal_models.architecture import (
    ExpertModules,
    LayerModules,
    PerLayerModules,
    PerLayerTrunk,
    Trunk,
    gated_ffn,
    refused,
    trunk_of,
)

__all__ = ["gemma4_experts", "gemma4_layer", "gemma4_text_part", "gemma4_trunk"]


def _trunk(body: Any) -> Trunk:
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
    """Return the modules of a model of text."""
    return _trunk(model.model)


def gemma4_text_part(model: Any) -> Trunk:
    """Return the modules of a model with images, without those of images and sounds."""
    return _trunk(model.model.language_model)


def _shared_keys(layer: Any) -> int | None:
    """Return the layer whose keys a layer reads: the last one of its type with its own."""
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
