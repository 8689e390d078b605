"""A model's encoder and decoder of transformers, read by their entry of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmdecode.models.configs import ActivationName, DecoderConfig, EncoderConfig
from lmdecode.models.weights import (
    DecoderWeights,
    EncoderLayerWeights,
    EncoderWeights,
    LayerWeights,
)
from lmdecode.readers.transformers.architecture import EncoderDecoder
from lmdecode.readers.transformers.architectures import ENCODER_DECODER_TYPES
from lmdecode.readers.transformers.module_weights import ACTIVATIONS, joined

__all__ = ["decoder_of", "encoder_of"]

# Distances for which T5's buckets are computed; larger ones need longer sequences.
_T5_DISTANCES = 8192


def decoder_of(model: Any) -> tuple[DecoderConfig, DecoderWeights]:
    """Return the config and the weights of a model's decoder.

    Raises ValueError if the model is not one of ``ENCODER_DECODER_TYPES``, or has an unknown
    activation.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in ENCODER_DECODER_TYPES or not hasattr(model, "get_output_embeddings"):
        raise ValueError(
            f"Decoding.from_pretrained: model is a {type(model).__name__} of type {kind!r}; "
            f"expected a conditional generation model of {', '.join(ENCODER_DECODER_TYPES)}"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"Decoding.from_pretrained: model is a {type(model).__name__}, which gives no logits; "
            "expected a conditional generation model, as AutoModelForSeq2SeqLM or "
            "AutoModelForSpeechSeq2Seq load it"
        )
    architecture = ENCODER_DECODER_TYPES[kind]
    with torch.no_grad():
        read = _t5_decoder if architecture.is_t5 else _bart_decoder
        return read(model, architecture)


def encoder_of(model: Any) -> tuple[EncoderConfig, EncoderWeights]:
    """Return the config and the weights of a model's encoder."""
    architecture = ENCODER_DECODER_TYPES[model.config.model_type]
    with torch.no_grad():
        read = _t5_encoder if architecture.is_t5 else _bart_encoder
        return read(model, architecture)


def _activation(name: object) -> ActivationName:
    """Return our name of an activation function; raise ValueError for an unknown one."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"Decoding.from_pretrained: the activation function is {name!r}; "
            f"expected one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _joined_modules(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """Return the concatenated weights and biases of linear modules."""
    return joined([(module.weight, module.bias) for module in modules])


def _norm(name: str, module: Any) -> dict[str, Any]:
    """Return the weights of a norm, which may be absent, or have no bias."""
    gamma, beta = getattr(module, "weight", None), getattr(module, "bias", None)
    return {f"{name}_gamma": gamma, f"{name}_beta": beta}


# --- BART -----------------------------------------------------------------------------------------


def _bart_sizes(
    model: Any, stack: Any, architecture: EncoderDecoder, heads: int, ffn_size: int
) -> dict[str, Any]:
    """Return the sizes and switches of an encoder or a decoder."""
    config = model.config
    is_scaled = architecture.scaled_embedding and config.scale_embedding
    return {
        "num_layers": len(stack.layers),
        "model_size": config.d_model,
        "num_heads": heads,
        "head_size": config.d_model // heads,
        "ffn_size": ffn_size,
        "norm_first": architecture.norm_first,
        "norm_epsilon": stack.layers[0].final_layer_norm.eps,
        "activation": _activation(config.activation_function),
        "embedding_scale": float(config.d_model) ** 0.5 if is_scaled else 1.0,
        "position_offset": architecture.position_offset(stack.embed_positions),
    }


def _bart_tables(stack: Any) -> dict[str, Any]:
    """Return the weights of an encoder or a decoder beside embeddings and layers."""
    table = stack.embed_positions
    return {
        "positions": table.weights if hasattr(table, "weights") else table.weight,
        "relative_bias": None,
        **_norm("embedding_norm", getattr(stack, "layernorm_embedding", None)),
        **_norm("final_norm", getattr(stack, "layer_norm", None)),
    }


def _bart_layer(layer: Any) -> dict[str, Any]:
    """Return the weights common to layers of the encoder and the decoder."""
    own = layer.self_attn
    qkv, qkv_bias = _joined_modules(own.q_proj, own.k_proj, own.v_proj)
    return {
        **_norm("self_norm", layer.self_attn_layer_norm),
        "qkv": qkv,
        "qkv_bias": qkv_bias,
        "self_out": own.out_proj.weight,
        "self_out_bias": own.out_proj.bias,
        **_norm("ffn_norm", layer.final_layer_norm),
        "ffn_up": layer.fc1.weight,
        "ffn_up_bias": layer.fc1.bias,
        "ffn_gate": None,
        "ffn_gate_bias": None,
        "ffn_down": layer.fc2.weight,
        "ffn_down_bias": layer.fc2.bias,
    }


def _bart_decoder_layer(layer: Any) -> LayerWeights:
    cross = layer.encoder_attn
    key_value, key_value_bias = _joined_modules(cross.k_proj, cross.v_proj)
    return LayerWeights(
        **_bart_layer(layer),
        **_norm("cross_norm", layer.encoder_attn_layer_norm),
        cross_query=cross.q_proj.weight,
        cross_query_bias=cross.q_proj.bias,
        cross_key_value=key_value,
        cross_key_value_bias=key_value_bias,
        cross_out=cross.out_proj.weight,
        cross_out_bias=cross.out_proj.bias,
    )


def _bart_decoder(model: Any, architecture: EncoderDecoder) -> tuple[DecoderConfig, DecoderWeights]:
    config, decoder, output = model.config, model.get_decoder(), model.get_output_embeddings()
    heads, ffn_size = config.decoder_attention_heads, config.decoder_ffn_dim
    padding = decoder.embed_positions.padding_idx if architecture.skips_padding else None
    bias = getattr(model, "final_logits_bias", None)
    return (
        DecoderConfig(
            **_bart_sizes(model, decoder, architecture, heads, ffn_size),
            vocab_size=output.weight.shape[0],
            unplaced_token=padding,
        ),
        DecoderWeights(
            **_bart_tables(decoder),
            embedding=decoder.embed_tokens.weight,
            logits=output.weight,
            logits_bias=output.bias if bias is None else bias.reshape(-1),
            layers=tuple(_bart_decoder_layer(layer) for layer in decoder.layers),
        ),
    )


def _bart_encoder(model: Any, architecture: EncoderDecoder) -> tuple[EncoderConfig, EncoderWeights]:
    config, encoder = model.config, model.get_encoder()
    heads, ffn_size = config.encoder_attention_heads, config.encoder_ffn_dim
    embedding = encoder.embed_tokens.weight if architecture.reads_tokens else None
    return (
        EncoderConfig(
            **_bart_sizes(model, encoder, architecture, heads, ffn_size),
            vocab_size=0 if embedding is None else embedding.shape[0],
        ),
        EncoderWeights(
            **_bart_tables(encoder),
            embedding=embedding,
            layers=tuple(EncoderLayerWeights(**_bart_layer(layer)) for layer in encoder.layers),
        ),
    )


# --- T5 -------------------------------------------------------------------------------------------


def _t5_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes and switches common to the encoder and the decoder."""
    return {
        "model_size": config.d_model,
        "num_heads": config.num_heads,
        "head_size": config.d_kv,
        "ffn_size": config.d_ff,
        "norm": "rms_norm",
        "norm_first": True,
        "norm_epsilon": config.layer_norm_epsilon,
        "activation": _activation(config.dense_act_fn),
        "gated": bool(config.is_gated_act),
        "attention_scale": 1.0,
    }


def _t5_tables(config: Any, stack: Any, places: Tensor) -> dict[str, Any]:
    """Return the weights beside embeddings and layers; ``places``: of keys less the query's.

    The relative bias of the scores is [heads, places] for T5, [layers * heads, places] for UMT5.
    """
    biases = []
    for block in stack.block:
        attention = block.layer[0].SelfAttention
        if not attention.has_relative_attention_bias:
            continue
        if config.model_type == "umt5":  # the module's attention has all settings
            buckets = attention._relative_position_bucket(places)
        else:
            buckets = attention._relative_position_bucket(
                places,
                bidirectional=not attention.is_decoder,
                num_buckets=config.relative_attention_num_buckets,
                max_distance=config.relative_attention_max_distance,
            )
        biases.append(attention.relative_attention_bias.weight[buckets].T)
    return {
        "positions": None,
        "relative_bias": torch.cat(biases),
        **_norm("embedding_norm", None),
        **_norm("final_norm", stack.final_layer_norm),
    }


def _t5_block(own: Any, ffn: Any) -> dict[str, Any]:
    """Return the weights common to blocks of the encoder and the decoder."""
    attention, feed_forward = own.SelfAttention, ffn.DenseReluDense
    gated = hasattr(feed_forward, "wi_1")
    qkv, _ = _joined_modules(attention.q, attention.k, attention.v)
    return {
        **_norm("self_norm", own.layer_norm),
        "qkv": qkv,
        "qkv_bias": None,
        "self_out": attention.o.weight,
        "self_out_bias": None,
        **_norm("ffn_norm", ffn.layer_norm),
        "ffn_up": (feed_forward.wi_1 if gated else feed_forward.wi).weight,
        "ffn_up_bias": None,
        "ffn_gate": feed_forward.wi_0.weight if gated else None,
        "ffn_gate_bias": None,
        "ffn_down": feed_forward.wo.weight,
        "ffn_down_bias": None,
    }


def _t5_decoder_block(block: Any) -> LayerWeights:
    own, cross, ffn = block.layer
    attention = cross.EncDecAttention
    key_value, _ = _joined_modules(attention.k, attention.v)
    return LayerWeights(
        **_t5_block(own, ffn),
        **_norm("cross_norm", cross.layer_norm),
        cross_query=attention.q.weight,
        cross_query_bias=None,
        cross_key_value=key_value,
        cross_key_value_bias=None,
        cross_out=attention.o.weight,
        cross_out_bias=None,
    )


def _t5_decoder(model: Any, _: EncoderDecoder) -> tuple[DecoderConfig, DecoderWeights]:
    config, decoder, output = model.config, model.get_decoder(), model.get_output_embeddings()
    tables = _t5_tables(config, decoder, -torch.arange(_T5_DISTANCES, device="cpu"))
    is_scaled = getattr(config, "scale_decoder_outputs", False)  # MT5Config has no such field
    if is_scaled or (config.model_type == "umt5" and config.tie_word_embeddings):
        tables["final_norm_gamma"] = decoder.final_layer_norm.weight.float() * config.d_model**-0.5
    return (
        DecoderConfig(
            **_t5_sizes(config),
            num_layers=len(decoder.block),
            vocab_size=output.weight.shape[0],
        ),
        DecoderWeights(
            **tables,
            embedding=decoder.embed_tokens.weight,
            logits=output.weight,
            logits_bias=None,
            layers=tuple(_t5_decoder_block(block) for block in decoder.block),
        ),
    )


def _t5_encoder(model: Any, _: EncoderDecoder) -> tuple[EncoderConfig, EncoderWeights]:
    encoder, embedding = model.get_encoder(), model.get_encoder().embed_tokens.weight
    places = torch.arange(1 - _T5_DISTANCES, _T5_DISTANCES, device="cpu")
    return (
        EncoderConfig(
            **_t5_sizes(model.config),
            num_layers=len(encoder.block),
            vocab_size=embedding.shape[0],
        ),
        EncoderWeights(
            **_t5_tables(model.config, encoder, places),
            embedding=embedding,
            layers=tuple(EncoderLayerWeights(**_t5_block(*block.layer)) for block in encoder.block),
        ),
    )
