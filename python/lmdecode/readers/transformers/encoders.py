"""Where each architecture has its encoder's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lmdecode.decoder.encoder import EncoderConfig, EncoderLayerWeights, EncoderWeights
from lmdecode.readers.transformers.module_weights import (
    T5_DISTANCES,
    activation,
    bart_parts,
    embedding_scale,
    positions_of,
    t5_bias,
    t5_parts,
    t5_sizes,
)

__all__ = ["encoder_of"]


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
            layers=tuple(
                EncoderLayerWeights(**bart_parts(layer))  # type: ignore[arg-type]
                for layer in encoder.layers
            ),
        ),
    )


def _marian(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    return _bart_kind(model, norm_first=False, scale=embedding_scale(model.config))


def _bart(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    offset = model.get_encoder().embed_positions.offset
    return _bart_kind(model, norm_first=False, scale=embedding_scale(model.config), offset=offset)


def _mbart(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    offset = model.get_encoder().embed_positions.offset
    return _bart_kind(model, norm_first=True, scale=embedding_scale(model.config), offset=offset)


def _m2m_100(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    offset = model.get_encoder().embed_positions.padding_idx + 1
    return _bart_kind(model, norm_first=True, scale=embedding_scale(model.config), offset=offset)


def _pegasus(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    return _bart_kind(model, norm_first=True, scale=embedding_scale(model.config))


def _whisper(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    return _bart_kind(model, norm_first=True, scale=1.0, takes_rows=True)


def _t5(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    config, encoder = model.config, model.get_encoder()
    places = torch.arange(1 - T5_DISTANCES, T5_DISTANCES, device="cpu")
    return (
        EncoderConfig(
            num_layers=len(encoder.block),
            vocab_size=encoder.embed_tokens.weight.shape[0],
            **t5_sizes(config),
        ),
        EncoderWeights(
            embedding=encoder.embed_tokens.weight,
            positions=None,
            relative_bias=t5_bias(config, encoder, places),
            embedding_norm_gamma=None,
            embedding_norm_beta=None,
            final_norm_gamma=encoder.final_layer_norm.weight,
            final_norm_beta=None,
            layers=tuple(
                EncoderLayerWeights(**t5_parts(*block.layer))  # type: ignore[arg-type]
                for block in encoder.block
            ),
        ),
    )


_ENCODERS: dict[str, Callable[[Any], tuple[EncoderConfig, EncoderWeights]]] = {
    "bart": _bart,
    "m2m_100": _m2m_100,
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
