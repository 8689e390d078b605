"""Config of a decoder-only model (sizes and switches), and its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lmdecode._checks import check_bool, check_int
from lmdecode.decoder.config import (
    ActivationName,
    Norm,
    check_norm_and_activation,
    check_numbers,
    check_sizes,
)
from lmdecode.decoder.experts import ExpertsConfig
from lmdecode.decoder.mixers import Mixer, checked_mixers
from lmdecode.linear.quantized_weight import LinearWeight

__all__ = ["CausalConfig", "CausalLayerWeights", "CausalWeights"]


@dataclass(frozen=True)
class CausalConfig:
    """Sizes and switches of a decoder-only model.

    A layer is ``x += attention(norm(x))``, then ``x += ffn(norm(x))``. A norm before a sublayer,
    and one of what the sublayer gives, are there where the weights have them.

    Parameters
    ----------
    num_layers, model_size, num_heads, num_kv_heads, head_size, ffn_size, vocab_size : int
        Sizes, each at least 1; ``num_kv_heads`` divides ``num_heads``, ``head_size`` is even where
        it is rotated. ``num_heads * head_size`` need not be ``model_size``.
    windows : tuple of (int or None)
        Of each layer: how many keys a query sees, its own among them. None: all.
    rotary : tuple of (int or None)
        Of each layer: which of the weights' ``rotary`` turns its queries and keys. None: none.
    rotary_size : int
        Features of a head that are turned, even, the first ones; feature i with feature
        ``i + rotary_size / 2``. ``head_size`` by default, 0 where no layer is turned.
    rotary_scales : tuple of float
        What cosines and sines are multiplied by, for each of the weights' ``rotary``.
    norm : {"rms_norm", "layer_norm"}
        Of every norm, those of queries and keys too.
    norm_epsilon : float
        Added to the variance, or to the mean square.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}
        Of the feed-forward layer.
    gated : bool
        ``activation(gate(x)) * up(x)`` instead of ``activation(up(x))``.
    attention_scale : float, optional
        What scores are multiplied by; ``head_size ** -0.5`` by default.
    attention_softcap, logits_softcap : float
        ``cap * tanh(x / cap)`` of scores, of logits. 0: none.
    embedding_scale, logits_scale : float
        What embeddings, and logits before their cap, are multiplied by.
    mixers : tuple of (ShortConvolution or GatedDeltaRule or None)
        Of each layer: what stands where attention stands, with its sizes. None: attention. Those
        that are not None are equal. By default all layers have attention. Entries of ``windows``
        and ``rotary`` are None where there is no attention.
    attention_gate : bool
        Attention's output is multiplied by the sigmoid of a part of the projection.
    experts : ExpertsConfig, optional
        Of layers whose feed-forward layer consists of experts.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """

    num_layers: int
    model_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    windows: tuple[int | None, ...]
    rotary: tuple[int | None, ...]
    rotary_size: int | None = None
    rotary_scales: tuple[float, ...] = ()
    norm: Norm = "rms_norm"
    norm_epsilon: float = 1e-6
    activation: ActivationName = "silu"
    gated: bool = True
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    mixers: tuple[Mixer | None, ...] = ()
    attention_gate: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "CausalConfig"
        check_sizes(op, self, "num_layers", "model_size", "num_heads", "num_kv_heads", "head_size",
                    "ffn_size", "vocab_size")  # fmt: skip
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{op}: num_kv_heads is {self.num_kv_heads}; "
                f"expected a divisor of num_heads = {self.num_heads}"
            )
        if (self.num_heads + 2 * self.num_kv_heads) * self.head_size >= 1 << 31:
            raise ValueError(
                f"{op}: {self.num_heads} heads of {self.head_size}; expected fewer than 2^31 in all"
            )
        for name in ("windows", "rotary"):
            entries = tuple(getattr(self, name))
            if len(entries) != self.num_layers:
                raise ValueError(
                    f"{op}: {name} has {len(entries)} entries; expected num_layers, "
                    f"{self.num_layers}"
                )
            object.__setattr__(self, name, entries)
        object.__setattr__(self, "mixers", checked_mixers(op, self.mixers, self.num_layers))
        check_bool(op, "attention_gate", self.attention_gate)
        for i, mixer in enumerate(self.mixers):
            if mixer is not None and (self.windows[i], self.rotary[i]) != (None, None):
                raise ValueError(
                    f"{op}: windows[{i}] and rotary[{i}] are {self.windows[i]} and "
                    f"{self.rotary[i]}; expected None, as mixers has no attention there"
                )
        for window in self.windows:
            if window is not None:
                check_int(op, "windows", window, 1, (1 << 31) - 1, limits="1 to 2^31 - 1, or None")
        object.__setattr__(self, "rotary_scales", tuple(map(float, self.rotary_scales)))
        for rotary in self.rotary:
            if rotary is not None:
                most = len(self.rotary_scales) - 1
                limits = f"0 to {most}, an entry of rotary_scales, or None"
                check_int(op, "rotary", rotary, 0, most, limits=limits)
        is_turned = any(rotary is not None for rotary in self.rotary)
        if self.rotary_size is None:
            object.__setattr__(self, "rotary_size", self.head_size if is_turned else 0)
        size = check_int(
            op, "rotary_size", self.rotary_size, 0, self.head_size, limits="0 to head_size"
        )
        if size % 2 or (is_turned and size == 0):
            raise ValueError(f"{op}: rotary_size is {size}; expected an even number above 0")
        check_bool(op, "gated", self.gated)
        if self.attention_scale is None:
            object.__setattr__(self, "attention_scale", self.head_size**-0.5)
        check_norm_and_activation(op, self)
        check_numbers(op, self, "norm_epsilon", "attention_scale", "attention_softcap",
                      "logits_softcap", "embedding_scale", "logits_scale")  # fmt: skip
        if isinstance(self.experts, Mapping):  # as dataclasses.asdict has it
            object.__setattr__(self, "experts", ExpertsConfig(**self.experts))
        if self.experts is not None:
            if len(self.experts.layers) != self.num_layers:
                raise ValueError(
                    f"{op}: experts.layers has {len(self.experts.layers)} entries; expected "
                    f"num_layers, {self.num_layers}"
                )
            if not self.gated:
                raise ValueError(f"{op}: gated is False; expected True with experts")

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward layer of a layer consists of experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def query_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_size

    @property
    def projected_size(self) -> int:
        """Features of queries, keys, values and, where there is one, the gate."""
        return self.query_size * (1 + self.attention_gate) + 2 * self.key_size

    @property
    def key_size(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_size


class CausalLayerWeights(NamedTuple):
    """One layer's weights; linear ones are [out, in], as ``torch.nn.Linear`` has them.

    D is ``model_size``, Q ``query_size``, K ``key_size``, F ``ffn_size``. None: no norm, no bias,
    no gate.

    Attributes
    ----------
    attention_norm_gamma, attention_norm_beta, ffn_norm_gamma, ffn_norm_beta : Tensor or None
        [D]: of what the sublayer reads.
    attention_out_norm_gamma, ffn_out_norm_gamma : Tensor or None
        [D]: of what the sublayer gives, before it is added.
    qkv, qkv_bias : Tensor
        [Q + 2 K, D], [Q + 2 K]: queries, keys and values. With ``attention_gate`` the gate's Q rows
        follow. Of a layer with a mixer its first projection, [``mixer.projected``, D].
    query_norm_gamma, key_norm_gamma : Tensor or None
        [head_size]: of each head; or [Q] and [K]: of all heads as one row. Before they are turned.
    attention_out : Tensor
        [D, Q], with bias [D]; of a layer with a mixer [D, ``mixer.mixed``].
    ffn_up, ffn_gate : Tensor
        [F, D], with bias [F].
    ffn_down : Tensor
        [D, F], with bias [D]. Of a layer with experts ``ffn_up``, ``ffn_gate`` and ``ffn_down`` are
        the shared expert's, with F ``experts.shared_size``, or None.
    convolution, convolution_bias : Tensor or None
        [``mixer.channels``, taps], the last tap the token's own, and [``mixer.channels``].
    decay, decay_bias, mixer_norm_gamma : Tensor or None
        Of a ``GatedDeltaRule``: [num_value_heads] each, and [value_size].
    sinks : Tensor or None
        [num_heads]: scores of a key without a value, one more for each query head.
    router, router_bias, router_choice_bias : Tensor or None
        Of a layer with E experts: [E, D]; [E], added to its product; and [E], added to what experts
        are chosen by.
    experts_gate, experts_up, experts_down : sequence of Tensor
        Of its E experts: each [X, D], [X, D] and [D, X], of X ``experts.size``; one tensor with E
        in front will do. Each is asked for once when they are packed.
    experts_gate_bias, experts_up_bias, experts_down_bias : Tensor or None
        [E, X], [E, X] and [E, D].
    shared_gate : Tensor or None
        [D]: the sigmoid of its product scales what the shared expert gives.
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


class CausalWeights(NamedTuple):
    """The weights of a decoder-only model, floats of any dtype.

    Attributes
    ----------
    embedding : Tensor
        [V, D].
    positions : Tensor or None
        [P, D], added to the embeddings: the model has P positions.
    rotary : tuple of Tensor
        Each [rotary_size / 2] float32: by how much each pair of features turns from one position to
        the next, in radians.
    final_norm_gamma, final_norm_beta : Tensor or None
        [D].
    logits, logits_bias : Tensor or None
        [V, D], the projection to the vocabulary, None where it is ``embedding``; [V].
    layers : sequence of CausalLayerWeights
        Each is asked for once when they are packed: it may be made then.
    """

    embedding: Tensor
    positions: Tensor | None
    rotary: tuple[Tensor, ...]
    final_norm_gamma: Tensor | None
    final_norm_beta: Tensor | None
    logits: Tensor | None
    logits_bias: Tensor | None
    layers: Sequence[CausalLayerWeights]
