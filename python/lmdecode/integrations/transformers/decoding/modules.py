"""What transformers' modules have in common: names of activations, products joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmdecode.decoder.config import ActivationName

__all__ = [
    "ACTIVATIONS", "T5_DISTANCES", "activation", "joined", "joined_modules", "positions_of",
    "t5_bias",
]  # fmt: skip

# For which T5's buckets are worked out; further ones would need longer sequences.
T5_DISTANCES = 8192

ACTIVATIONS: dict[str, ActivationName] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def joined(linears: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Return [out, in] weights and biases of several, one behind the other; of one, its own."""
    if len(linears) == 1:
        return linears[0]
    weight = torch.cat([weight for weight, _ in linears])
    if all(bias is None for _, bias in linears):
        return weight, None
    biases = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in linears
    ]
    return weight, torch.cat(biases)


def activation(name: object) -> ActivationName:
    """Return our name of an activation function; raise ValueError for one that there is not."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"Decoding.from_pretrained: the activation function is {name!r}; "
            f"expected one of {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def joined_modules(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weights and the biases of linear modules, one behind the other."""
    return joined([(module.weight, module.bias) for module in modules])


def positions_of(stack: Any) -> Tensor:
    """Return the table of positions of an encoder or decoder of BART's kind."""
    table = stack.embed_positions
    found: Tensor = table.weights if hasattr(table, "weights") else table.weight
    return found


def t5_bias(config: Any, stack: Any, places: Tensor) -> Tensor:
    """Return what scores have added, by the key's place less the query's.

    Of T5 [heads, places], of UMT5 [layers * heads, places].
    """
    attentions = [block.layer[0].SelfAttention for block in stack.block]
    biases = []
    for attention in attentions:
        if not attention.has_relative_attention_bias:
            continue
        if config.model_type == "umt5":  # whose attention knows all of it
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
