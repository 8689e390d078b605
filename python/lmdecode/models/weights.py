"""The weights of models, by name: floats of any dtype, or blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from lmdecode.linear.quantized_weight import LinearWeight
from lmdecode.models.configs import CausalConfig

__all__ = ["CausalLayerWeights", "CausalWeights", "DecoderWeights", "EncoderLayerWeights",
           "EncoderWeights", "ExpertMatrices", "LayerWeights"]  # fmt: skip


class CausalLayerWeights(NamedTuple):
    """One layer's weights; linear ones are [out, in], as ``torch.nn.Linear`` has them.

    D is ``model_size``, Q, K and head_size are those of ``CausalConfig.heads``, F is the layer's of
    ``ffn_sizes``, P ``per_layer_size``. None: no norm, no bias, no gate.

    Attributes
    ----------
    attention_norm_gamma, attention_norm_beta, ffn_norm_gamma, ffn_norm_beta : Tensor or None
        [D]: norms of the sublayer's input.
    attention_out_norm_gamma, ffn_out_norm_gamma : Tensor or None
        [D]: norms of the sublayer's output, before it is added.
    qkv, qkv_bias : Tensor
        [Q + 2 K, D], [Q + 2 K]: queries, keys and values; without values where keys are these,
        queries alone where keys are another layer's. With ``attention_gate`` the gate's Q rows
        follow. A layer with a mixer has its first projection, [``mixer.projected``, D], instead,
        or with ``attention_beside`` after these.
    query_norm_gamma, key_norm_gamma : Tensor or None
        [head_size]: of each head; or [Q] and [K]: of all heads as one row. Before they are turned.
    attention_out : Tensor
        [D, Q], with bias [D]; of a layer with a mixer [D, ``mixer.mixed``], with
        ``attention_beside`` [D, Q + ``mixer.mixed``].
    ffn_up, ffn_gate : Tensor
        [F, D], with bias [F].
    ffn_down : Tensor
        [D, F], with bias [D]. In a layer with experts ``ffn_up``, ``ffn_gate`` and ``ffn_down`` are
        the shared expert's, with F ``experts.shared_size``, or None.
    convolution, convolution_bias : Tensor or None
        [``mixer.channels``, taps], the last tap the token's own, and [``mixer.channels``].
    decay, decay_bias, mixer_norm_gamma : Tensor or None
        For a ``GatedDeltaRule`` [num_value_heads] each, and [value_size]. For a ``Mamba2``
        [num_heads] each, and [``mixer.mixed``], or None: no norm.
    sinks : Tensor or None
        [num_heads]: scores of a key without a value, one more for each query head.
    router, router_bias, router_choice_bias : Tensor or None
        For a layer with E experts: [E, D]; [E], added to its product; and [E], added only to choose
        the experts.
    experts_gate, experts_up, experts_down : sequence of Tensor
        For its E experts: each [X, D], [X, D] and [D, X], X being ``experts.size``; or one tensor
        with E in front. Each is asked for once when they are packed.
    experts_gate_bias, experts_up_bias, experts_down_bias : Tensor or None
        [E, X], [E, X] and [E, D].
    shared_gate : Tensor or None
        [D]: the sigmoid of its product scales the shared expert's output.
    router_scale : Tensor or None
        [E]: factors of the experts' weights, applied last.
    router_norm_gamma, experts_norm_gamma : Tensor or None
        [D]: norms of the router's input, and of the experts' input. The shared expert reads the
        output of ``ffn_norm_gamma``.
    experts_out_norm_gamma, shared_out_norm_gamma : Tensor or None
        [D]: norms of the experts' output, and of the shared one's, before these are added. A layer
        has all four of these norms, or none.
    per_layer_gate, per_layer_out, per_layer_out_norm_gamma : Tensor or None
        [P, D], [D, P] and [D], where P is not 0: after the feed-forward layer comes
        ``x += norm(out(activation(gate(x)) * inputs))`` with the token's inputs of the layer.
    layer_scale : Tensor or None
        [1]: factor of x, applied last.
    mixer_skip : Tensor or None
        For a ``Mamba2``: [num_heads].
    """

    attention_norm_gamma: Tensor | None
    attention_norm_beta: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm_gamma: Tensor | None
    key_norm_gamma: Tensor | None
    attention_out: Tensor
    attention_out_bias: Tensor | None
    attention_out_norm_gamma: Tensor | None
    ffn_norm_gamma: Tensor | None
    ffn_norm_beta: Tensor | None
    ffn_up: Tensor | None
    ffn_up_bias: Tensor | None
    ffn_gate: Tensor | None
    ffn_gate_bias: Tensor | None
    ffn_down: Tensor | None
    ffn_down_bias: Tensor | None
    ffn_out_norm_gamma: Tensor | None
    convolution: Tensor | None = None
    convolution_bias: Tensor | None = None
    decay: Tensor | None = None
    decay_bias: Tensor | None = None
    mixer_norm_gamma: Tensor | None = None
    sinks: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None
    router_choice_bias: Tensor | None = None
    experts_gate: Sequence[LinearWeight] | Tensor | None = None
    experts_gate_bias: Tensor | None = None
    experts_up: Sequence[LinearWeight] | Tensor | None = None
    experts_up_bias: Tensor | None = None
    experts_down: Sequence[LinearWeight] | Tensor | None = None
    experts_down_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    router_norm_gamma: Tensor | None = None
    router_scale: Tensor | None = None
    experts_norm_gamma: Tensor | None = None
    experts_out_norm_gamma: Tensor | None = None
    shared_out_norm_gamma: Tensor | None = None
    per_layer_gate: Tensor | None = None
    per_layer_out: Tensor | None = None
    per_layer_out_norm_gamma: Tensor | None = None
    layer_scale: Tensor | None = None
    mixer_skip: Tensor | None = None


class CausalWeights(NamedTuple):
    """The weights of a decoder-only model, floats of any dtype.

    Attributes
    ----------
    embedding : Tensor
        [V, D].
    positions : Tensor or None
        [P, D], added to the embeddings: the model has P positions.
    rotary : tuple of Tensor
        Each [rotary_size / 2] float32, of the layers that it turns: by how much each pair of
        features turns from one position to the next, in radians.
    final_norm_gamma, final_norm_beta : Tensor or None
        [D].
    logits, logits_bias : Tensor or None
        [V, D], the projection to the vocabulary, None where it is ``embedding``; [V].
    layers : sequence of CausalLayerWeights
        Each is asked for once when they are packed: it may be made then.
    per_layer_embedding, per_layer_projection, per_layer_norm_gamma : Tensor or None
        [V, L P], [L P, D] and [P], of L layers and P ``per_layer_size``, where that is not 0. A
        token's inputs of a layer are its row, scaled, and the norm of the product of its
        embedding, scaled.
    embedding_norm_gamma, hidden_norm_gamma : Tensor or None
        [D]: of embeddings, and of hidden rows, before their projections.
    embedding_projection, hidden_projection : Tensor or None
        [D, D] each. Where they are there, a row is not a token's embedding but a projection of it
        and of what another model has behind its final norm of the token before.
    mtp : tuple of (CausalConfig, CausalWeights), or None
        Multi-token prediction: a model with a ``hidden_projection`` and one layer, whose rows begin
        with what this one computed. Its ``embedding``, ``rotary`` and ``logits`` are this one's.
    """

    embedding: Tensor
    positions: Tensor | None
    rotary: tuple[Tensor, ...]
    final_norm_gamma: Tensor | None
    final_norm_beta: Tensor | None
    logits: Tensor | None
    logits_bias: Tensor | None
    layers: Sequence[CausalLayerWeights]
    per_layer_embedding: Tensor | None = None
    per_layer_projection: Tensor | None = None
    per_layer_norm_gamma: Tensor | None = None
    embedding_norm_gamma: Tensor | None = None
    hidden_norm_gamma: Tensor | None = None
    embedding_projection: Tensor | None = None
    hidden_projection: Tensor | None = None
    mtp: tuple[CausalConfig, CausalWeights] | None = None


class ExpertMatrices(Sequence[LinearWeight]):
    """The matrices of one kind of a layer's ``count`` experts, each read when it is asked for.

    ``read`` returns the [out, in] matrix of an expert.
    """

    def __init__(self, count: int, read: Callable[[int], LinearWeight]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LinearWeight: ...
    @overload
    def __getitem__(self, index: slice) -> list[LinearWeight]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(self._count)[index]
        return self._read(places) if isinstance(places, int) else list(map(self._read, places))


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


class EncoderLayerWeights(NamedTuple):
    """One layer's weights, as those of ``LayerWeights`` without cross-attention.

    D is ``model_size``, A ``num_heads * head_size``, F ``ffn_size``.
    """

    self_norm_gamma: Tensor | None
    self_norm_beta: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    self_out: Tensor
    self_out_bias: Tensor | None
    ffn_norm_gamma: Tensor | None
    ffn_norm_beta: Tensor | None
    ffn_up: Tensor
    ffn_up_bias: Tensor | None
    ffn_gate: Tensor | None
    ffn_gate_bias: Tensor | None
    ffn_down: Tensor
    ffn_down_bias: Tensor | None


class EncoderWeights(NamedTuple):
    """The weights of an encoder, floats of any dtype.

    ``embedding`` is [V, D], or None if the encoder reads rows. ``positions``, [P, D], are added to
    the embeddings. ``relative_bias`` is added to the scores by key position - query position, from
    1 - n on: [heads, 2 n - 1] for all layers, or [layers * heads, 2 n - 1]. Norms are [D]; without
    a gamma there is no norm.
    """

    embedding: Tensor | None
    positions: Tensor | None
    relative_bias: Tensor | None
    embedding_norm_gamma: Tensor | None
    embedding_norm_beta: Tensor | None
    final_norm_gamma: Tensor | None
    final_norm_beta: Tensor | None
    layers: tuple[EncoderLayerWeights, ...]
