"""Config of a transformer decoder (sizes and switches), and its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import check_bool, check_int, check_number
from lmdecode.linear import ACTIVATIONS
from lmdecode.linear.formats import FORMATS

__all__ = ["ACTIVATIONS", "FORMATS", "DecoderConfig", "DecoderWeights", "LayerWeights"]

Norm = Literal["layer_norm", "rms_norm"]
ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu"]

NORMS = ("layer_norm", "rms_norm")


def check_sizes(op: str, config: object, *names: str, least: int = 1) -> None:
    """Convert each size of a config to an int; raise if it is not one."""
    for name in names:
        limits = f"{least} to 2^31 - 1"
        size = check_int(op, name, getattr(config, name), least, (1 << 31) - 1, limits=limits)
        object.__setattr__(config, name, size)


def check_norm_and_activation(op: str, config: object) -> None:
    """Raise ValueError if a config names an unknown norm or activation."""
    for name, choices in (("norm", NORMS), ("activation", ACTIVATIONS)):
        value = getattr(config, name)
        if value not in tuple(choices):
            raise ValueError(f"{op}: {name} is {value!r}; expected one of {', '.join(choices)}")


def check_numbers(op: str, config: object, *names: str) -> None:
    """Convert each number of a config to a float; raise if it is not finite.

    Epsilons and caps are at least 0.
    """
    for name in names:
        number = check_number(op, name, getattr(config, name))
        at_least_0 = name.endswith(("_epsilon", "_softcap"))
        if not math.isfinite(number) or (at_least_0 and number < 0):
            raise ValueError(
                f"{op}: {name} is {number}; "
                f"expected a finite number{' of at least 0' if at_least_0 else ''}"
            )
        object.__setattr__(config, name, number)


def check_switches(op: str, config: Any) -> None:
    """Check heads, flags and names of a decoder's or encoder's config, and fill in its scale."""
    if config.num_heads * config.head_size >= 1 << 31:
        raise ValueError(
            f"{op}: {config.num_heads} heads of {config.head_size}; expected fewer than 2^31 in all"
        )
    for name in ("norm_first", "gated"):
        check_bool(op, name, getattr(config, name))
    if config.attention_scale is None:
        object.__setattr__(config, "attention_scale", config.head_size**-0.5)
    check_norm_and_activation(op, config)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder with cross-attention.

    Parameters
    ----------
    num_layers, model_size, num_heads, head_size, ffn_size, vocab_size : int
        Sizes, each at least 1. ``num_heads * head_size`` need not be ``model_size``.
    memory_size : int, optional
        Features of the encoder's output; ``model_size`` by default.
    norm : {"layer_norm", "rms_norm"}
        Of every norm.
    norm_first : bool
        A norm before each sublayer (and ``final_norm``), or one after each residual.
    norm_epsilon : float
        Added to the variance.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}
        Of the feed-forward layer.
    gated : bool
        ``activation(gate(x)) * up(x)`` instead of ``activation(up(x))``.
    attention_scale : float, optional
        Factor of the scores; ``head_size ** -0.5`` by default.
    denominator_epsilon : float
        Added to the sum that softmax divides by.
    embedding_scale : float
        Factor of the embeddings.
    position_offset : int
        The row of the position table that position 0 has.
    unplaced_token : int, optional
        A token that no position is added to, as M2M100's padding.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """

    num_layers: int
    model_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    memory_size: int | None = None
    norm: Norm = "layer_norm"
    norm_first: bool = False
    norm_epsilon: float = 1e-5
    activation: ActivationName = "relu"
    gated: bool = False
    attention_scale: float | None = None
    denominator_epsilon: float = 0.0
    embedding_scale: float = 1.0
    position_offset: int = 0
    unplaced_token: int | None = None

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "DecoderConfig"
        if self.memory_size is None:
            object.__setattr__(self, "memory_size", self.model_size)
        check_sizes(op, self, "num_layers", "model_size", "num_heads", "head_size", "ffn_size",
                    "vocab_size", "memory_size")  # fmt: skip
        check_sizes(op, self, "position_offset", least=0)
        if self.unplaced_token is not None:
            check_sizes(op, self, "unplaced_token", least=0)
        check_switches(op, self)
        check_numbers(
            op, self, "norm_epsilon", "attention_scale", "denominator_epsilon", "embedding_scale"
        )

    @property
    def attention_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_size


class LayerWeights(NamedTuple):
    """One layer's weights; linear ones are [out, in], as ``torch.nn.Linear`` has them.

    D is ``model_size``, A ``num_heads * head_size``, F ``ffn_size``, M ``memory_size``. None: no
    bias, no gate, or 1 and 0 for a norm.

    Attributes
    ----------
    self_norm_gamma, self_norm_beta, cross_norm_gamma, ..., ffn_norm_beta : Tensor
        [D]: for the norm before or after that sublayer.
    qkv, qkv_bias : Tensor
        [3 * A, D], [3 * A]: queries, keys and values of self-attention.
    self_out, cross_out : Tensor
        [D, A], with bias [D].
    cross_query : Tensor
        [A, D].
    cross_key_value : Tensor
        [2 * A, M].
    ffn_up, ffn_gate : Tensor
        [F, D].
    ffn_down : Tensor
        [D, F].
    """

    self_norm_gamma: Tensor | None
    self_norm_beta: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    self_out: Tensor
    self_out_bias: Tensor | None
    cross_norm_gamma: Tensor | None
    cross_norm_beta: Tensor | None
    cross_query: Tensor
    cross_query_bias: Tensor | None
    cross_key_value: Tensor
    cross_key_value_bias: Tensor | None
    cross_out: Tensor
    cross_out_bias: Tensor | None
    ffn_norm_gamma: Tensor | None
    ffn_norm_beta: Tensor | None
    ffn_up: Tensor
    ffn_up_bias: Tensor | None
    ffn_gate: Tensor | None
    ffn_gate_bias: Tensor | None
    ffn_down: Tensor
    ffn_down_bias: Tensor | None


class DecoderWeights(NamedTuple):
    """The weights of a decoder, floats of any dtype.

    Attributes
    ----------
    embedding : Tensor
        [V, D].
    positions : Tensor or None
        [P, D], added to the embeddings.
    relative_bias : Tensor or None
        [heads, distances], added to the scores of self-attention, by the distance from the query
        back to the key; or [layers * heads, distances], of each layer its own.
    embedding_norm_gamma, embedding_norm_beta, final_norm_gamma, final_norm_beta : Tensor or None
        [D]; a gamma of None: no such norm.
    logits, logits_bias : Tensor
        [V, D], [V] or None: the projection to the vocabulary.
    layers : tuple of LayerWeights
    """

    embedding: Tensor
    positions: Tensor | None
    relative_bias: Tensor | None
    embedding_norm_gamma: Tensor | None
    embedding_norm_beta: Tensor | None
    final_norm_gamma: Tensor | None
    final_norm_beta: Tensor | None
    logits: Tensor
    logits_bias: Tensor | None
    layers: tuple[LayerWeights, ...]


def bias_of_layer(config: Any, relative_bias: Tensor | None, layer: int) -> Tensor | None:
    """Return [heads, distances] of a layer of a decoder or an encoder, or None."""
    if relative_bias is None or relative_bias.shape[0] == config.num_heads:
        return relative_bias
    return relative_bias[layer * config.num_heads :][: config.num_heads]


LINEAR_FIELDS = frozenset(
    ("qkv", "self_out", "cross_query", "cross_key_value", "cross_out", "ffn_up", "ffn_gate",
     "ffn_down", "logits")
)  # fmt: skip


def float32(tensor: Tensor | None) -> Tensor:
    """Return a contiguous float32 tensor on the CPU, empty for None."""
    if tensor is None:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
