"""Where each architecture keeps its encoder's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lmdecode.decoder.encoder import EncoderConfig, EncoderLayerWeights, EncoderWeights
from lmdecode.integrations.transformers.decoding.modules import (
    T5_DISTANCES,
    activation,
    joined_modules,
    positions_of,
    t5_bias,
)

__all__ = ["encoder_of"]


def _bart_layer(layer: Any) -> EncoderLayerWeights:
    """Return a layer of BART's kind: Marian, mBART, M2M100, Pegasus and Whisper have the same."""
    own = layer.self_attn
    qkv, qkv_bias = joined_modules(own.q_proj, own.k_proj, own.v_proj)
    return EncoderLayerWeights(
        self_norm_gamma=layer.self_attn_layer_norm.weight,
        self_norm_beta=layer.self_attn_layer_norm.bias,
        qkv=qkv,
        qkv_bias=qkv_bias,
        self_out=own.out_proj.weight,
        self_out_bias=own.out_proj.bias,
        ffn_norm_gamma=layer.final_layer_norm.weight,
        ffn_norm_beta=layer.final_layer_norm.bias,
        ffn_up=layer.fc1.weight,
        ffn_up_bias=layer.fc1.bias,
        ffn_gate=None,
        ffn_gate_bias=None,
        ffn_down=layer.fc2.weight,
        ffn_down_bias=layer.fc2.bias,
    )


def _bart_kind(
    model: Any, *, norm_first: bool, scale: float, offset: int = 0, takes_rows: bool = False
) -> tuple[EncoderConfig, EncoderWeights]:
    config, encoder = model.config, model.get_encoder()
    heads = config.encoder_attention_heads
    first = getattr(encoder, "layernorm_embedding", None)
    last = getattr(encoder, "layer_norm", None)
    return (
        EncoderConfig(
            num_layers=len(encoder.layers),
            model_size=config.d_model,
            num_heads=heads,
            head_size=config.d_model // heads,
            ffn_size=config.encoder_ffn_dim,
            vocab_size=0 if takes_rows else encoder.embed_tokens.weight.shape[0],
            norm_first=norm_first,
            norm_epsilon=encoder.layers[0].final_layer_norm.eps,
            activation=activation(config.activation_function),
            embedding_scale=scale,
            position_offset=offset,
        ),
        EncoderWeights(
            embedding=None if takes_rows else encoder.embed_tokens.weight,
            positions=positions_of(encoder),
            relative_bias=None,
            embedding_norm_gamma=None if first is None else first.weight,
            embedding_norm_beta=None if first is None else first.bias,
            final_norm_gamma=None if last is None else last.weight,
            final_norm_beta=None if last is None else last.bias,
            layers=tuple(_bart_layer(layer) for layer in encoder.layers),
        ),
    )


def _scale(config: Any) -> float:
    return float(config.d_model) ** 0.5 if config.scale_embedding else 1.0


def _marian(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    return _bart_kind(model, norm_first=False, scale=_scale(model.config))


def _bart(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    offset = model.get_encoder().embed_positions.offset
    return _bart_kind(model, norm_first=False, scale=_scale(model.config), offset=offset)


def _mbart(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    offset = model.get_encoder().embed_positions.offset
    return _bart_kind(model, norm_first=True, scale=_scale(model.config), offset=offset)


def _pegasus(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    return _bart_kind(model, norm_first=True, scale=_scale(model.config))


def _whisper(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    return _bart_kind(model, norm_first=True, scale=1.0, takes_rows=True)


def _t5_layer(block: Any, gated: bool) -> EncoderLayerWeights:
    own, ffn = block.layer
    attention, feed_forward = own.SelfAttention, ffn.DenseReluDense
    qkv, _ = joined_modules(attention.q, attention.k, attention.v)
    return EncoderLayerWeights(
        self_norm_gamma=own.layer_norm.weight,
        self_norm_beta=None,
        qkv=qkv,
        qkv_bias=None,
        self_out=attention.o.weight,
        self_out_bias=None,
        ffn_norm_gamma=ffn.layer_norm.weight,
        ffn_norm_beta=None,
        ffn_up=(feed_forward.wi_1 if gated else feed_forward.wi).weight,
        ffn_up_bias=None,
        ffn_gate=feed_forward.wi_0.weight if gated else None,
        ffn_gate_bias=None,
        ffn_down=feed_forward.wo.weight,
        ffn_down_bias=None,
    )


def _t5(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    config, encoder = model.config, model.get_encoder()
    gated = bool(config.is_gated_act)
    places = torch.arange(1 - T5_DISTANCES, T5_DISTANCES)
    return (
        EncoderConfig(
            num_layers=len(encoder.block),
            model_size=config.d_model,
            num_heads=config.num_heads,
            head_size=config.d_kv,
            ffn_size=config.d_ff,
            vocab_size=encoder.embed_tokens.weight.shape[0],
            norm="rms_norm",
            norm_first=True,
            norm_epsilon=config.layer_norm_epsilon,
            activation=activation(config.dense_act_fn),
            gated=gated,
            attention_scale=1.0,
        ),
        EncoderWeights(
            embedding=encoder.embed_tokens.weight,
            positions=None,
            relative_bias=t5_bias(config, encoder, places),
            embedding_norm_gamma=None,
            embedding_norm_beta=None,
            final_norm_gamma=encoder.final_layer_norm.weight,
            final_norm_beta=None,
            layers=tuple(_t5_layer(block, gated) for block in encoder.block),
        ),
    )


_ENCODERS: dict[str, Callable[[Any], tuple[EncoderConfig, EncoderWeights]]] = {
    "bart": _bart,
    "m2m_100": _mbart,
    "marian": _marian,
    "mbart": _mbart,
    "mt5": _t5,
    "pegasus": _pegasus,
    "t5": _t5,
    "umt5": _t5,
    "whisper": _whisper,
}


def encoder_of(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    """Return the config and the weights of a model's encoder."""
    with torch.no_grad():
        return _ENCODERS[model.config.model_type](model)
