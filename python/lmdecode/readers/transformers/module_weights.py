"""Weights and settings that decoders and encoders of transformers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.config import ActivationName
from lmdecode.linear.quantized_weight import join_rows

__all__ = [
    "ACTIVATIONS",
    "T5_DISTANCES",
    "activation",
    "bart_parts",
    "embedding_scale",
    "joined",
    "joined_modules",
    "positions_of",
    "t5_bias",
    "t5_parts",
    "t5_sizes",
]


# Distances for which T5's buckets are computed; larger ones need longer sequences.
T5_DISTANCES = 8192

ACTIVATIONS: dict[str, ActivationName] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def joined(linears: Sequence[tuple[Any, Tensor | None]]) -> tuple[Any, Tensor | None]:
    """Return concatenated [out, in] weights and biases; a single one is returned as it is.

    Weights may be in blocks: see ``join_rows``.
    """
    if len(linears) == 1:
        return linears[0]
    weight = join_rows([weight for weight, _ in linears])
    known = [bias for _, bias in linears if bias is not None]
    if not known:
        return weight, None
    biases = [
        known[0].new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in linears
    ]
    return weight, torch.cat(biases)


def activation(name: object) -> ActivationName:
    """Return our name of an activation function; raise ValueError for an unknown one."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"Decoding.from_pretrained: the activation function is {name!r}; "
            f"expected one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def joined_modules(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """Return the concatenated weights and biases of linear modules."""
    return joined([(module.weight, module.bias) for module in modules])


def positions_of(stack: Any) -> Tensor:
    """Return the table of positions of an encoder or decoder of BART's kind."""
    table = stack.embed_positions
    found: Tensor = table.weights if hasattr(table, "weights") else table.weight
    return found


def t5_bias(config: Any, stack: Any, places: Tensor) -> Tensor:
    """Return the relative bias of the scores, by the key's position less the query's.

    [heads, places] for T5, [layers * heads, places] for UMT5.
    """
    attentions = [block.layer[0].SelfAttention for block in stack.block]
    biases = []
    for attention in attentions:
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
    return torch.cat(biases)


def embedding_scale(config: Any) -> float:
    """Return the factor of the embeddings in BART-like models."""
    return float(config.d_model) ** 0.5 if config.scale_embedding else 1.0


def bart_parts(layer: Any) -> dict[str, Tensor | None]:
    """Return the weights common to layers of BART's encoder and decoder, by our names.

    Marian, mBART, M2M100, Pegasus and Whisper have the same modules.
    """
    own = layer.self_attn
    qkv, qkv_bias = joined_modules(own.q_proj, own.k_proj, own.v_proj)
    return {
        "self_norm_gamma": layer.self_attn_layer_norm.weight,
        "self_norm_beta": layer.self_attn_layer_norm.bias,
        "qkv": qkv,
        "qkv_bias": qkv_bias,
        "self_out": own.out_proj.weight,
        "self_out_bias": own.out_proj.bias,
        "ffn_norm_gamma": layer.final_layer_norm.weight,
        "ffn_norm_beta": layer.final_layer_norm.bias,
        "ffn_up": layer.fc1.weight,
        "ffn_up_bias": layer.fc1.bias,
        "ffn_gate": None,
        "ffn_gate_bias": None,
        "ffn_down": layer.fc2.weight,
        "ffn_down_bias": layer.fc2.bias,
    }


def t5_parts(own: Any, ffn: Any) -> dict[str, Tensor | None]:
    """Return the weights common to blocks of T5's encoder and decoder, by our names."""
    attention, feed_forward = own.SelfAttention, ffn.DenseReluDense
    gated = hasattr(feed_forward, "wi_1")
    qkv, _ = joined_modules(attention.q, attention.k, attention.v)
    return {
        "self_norm_gamma": own.layer_norm.weight,
        "self_norm_beta": None,
        "qkv": qkv,
        "qkv_bias": None,
        "self_out": attention.o.weight,
        "self_out_bias": None,
        "ffn_norm_gamma": ffn.layer_norm.weight,
        "ffn_norm_beta": None,
        "ffn_up": (feed_forward.wi_1 if gated else feed_forward.wi).weight,
        "ffn_up_bias": None,
        "ffn_gate": feed_forward.wi_0.weight if gated else None,
        "ffn_gate_bias": None,
        "ffn_down": feed_forward.wo.weight,
        "ffn_down_bias": None,
    }


def t5_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes and switches common to T5's encoder and decoder."""
    return {
        "model_size": config.d_model,
        "num_heads": config.num_heads,
        "head_size": config.d_kv,
        "ffn_size": config.d_ff,
        "norm": "rms_norm",
        "norm_first": True,
        "norm_epsilon": config.layer_norm_epsilon,
        "activation": activation(config.dense_act_fn),
        "gated": bool(config.is_gated_act),
        "attention_scale": 1.0,
    }
