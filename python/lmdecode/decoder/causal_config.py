"""Config of a decoder-only model (sizes and switches), and its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

__all__ = ["CausalConfig", "CausalLayerWeights", "CausalWeights", "Heads"]


class Heads(NamedTuple):
    """Sizes of the heads of a layer, as in ``CausalConfig``."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int

    @property
    def query_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_size


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
        Factor of the cosines and sines, for each of the weights' ``rotary``.
    norm : {"rms_norm", "layer_norm"}
        Kind of every norm, also of queries and keys.
    norm_epsilon : float
        Added to the variance, or to the mean square.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}
        Of the feed-forward layer.
    gated : bool
        ``activation(gate(x)) * up(x)`` instead of ``activation(up(x))``.
    attention_scale : float, optional
        Factor of the scores; ``head_size ** -0.5`` by default.
    attention_softcap, logits_softcap : float
        ``cap * tanh(x / cap)`` of scores, of logits. 0: none.
    embedding_scale, logits_scale : float
        Factors of the embeddings, and of the logits before their cap.
    mixers : tuple of (ShortConvolution or GatedDeltaRule or Mamba2 or None)
        The mixer of each layer, in place of attention, with its sizes. None: attention. Mixers are
        equal. By default all layers have attention. Entries of ``windows``
        and ``rotary`` are None without attention.
    attention_gate : bool
        Attention's output is multiplied by the sigmoid of a part of the projection.
    experts : ExpertsConfig, optional
        For layers with a feed-forward layer of experts.
    global_head_size, global_num_kv_heads, global_rotary_size : int, optional
        For layers without a window: ``head_size``, ``num_kv_heads`` and ``rotary_size`` by default.
    ffn_sizes : tuple of int
        Inner features of each layer's feed-forward layer; ``ffn_size``, their largest, by default.
    shared_keys : tuple of (int or None)
        Of each layer: which layer before it has the keys and values that its queries see. None:
        its own. Both layers have a window, or none of them.
    keys_are_values : tuple of bool
        Of each layer: whether values are what keys are before their norm, and before they are
        turned.
    value_norm : bool
        Values of each head are divided by the root of their mean square + ``norm_epsilon``.
    per_layer_size : int
        Features that a token gives to each layer beside its embedding. 0: none.
    per_layer_scale, per_layer_epsilon : float
        Factor of the rows of ``per_layer_embedding``, and the epsilon that the norm with
        ``per_layer_norm_gamma`` adds to the mean square of a projection.
    attention_beside : bool
        Every layer has a ``Mamba2``, and attention beside it: both read the same input, and their
        outputs are added.

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
    global_head_size: int | None = None
    global_num_kv_heads: int | None = None
    global_rotary_size: int | None = None
    ffn_sizes: tuple[int, ...] = ()
    shared_keys: tuple[int | None, ...] = ()
    keys_are_values: tuple[bool, ...] = ()
    value_norm: bool = False
    per_layer_size: int = 0
    per_layer_scale: float = 1.0
    per_layer_epsilon: float = 0.0
    attention_beside: bool = False

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "CausalConfig"
        check_sizes(op, self, "num_layers", "model_size", "num_heads", "num_kv_heads", "head_size",
                    "ffn_size", "vocab_size")  # fmt: skip
        self._check_heads(op)
        self._check_mixers(op)
        self._check_positions(op)
        check_bool(op, "gated", self.gated)
        if self.attention_scale is None:
            object.__setattr__(self, "attention_scale", self.head_size**-0.5)
        check_norm_and_activation(op, self)
        check_numbers(op, self, "norm_epsilon", "attention_scale", "attention_softcap",
                      "logits_softcap", "embedding_scale", "logits_scale")  # fmt: skip
        self._check_experts(op)
        self._check_layers(op)
        check_bool(op, "value_norm", self.value_norm)
        most = ((1 << 31) - 1) // self.num_layers
        limits = "0 to (2^31 - 1) / num_layers"
        check_int(op, "per_layer_size", self.per_layer_size, 0, most, limits=limits)
        check_numbers(op, self, "per_layer_scale", "per_layer_epsilon")

    def _check_heads(self, op: str) -> None:
        for name in ("head_size", "num_kv_heads"):
            if getattr(self, f"global_{name}") is None:
                object.__setattr__(self, f"global_{name}", getattr(self, name))
        check_sizes(op, self, "global_head_size", "global_num_kv_heads")
        for prefix in ("", "global_"):
            kv_heads, size = (getattr(self, prefix + n) for n in ("num_kv_heads", "head_size"))
            if self.num_heads % kv_heads:
                raise ValueError(
                    f"{op}: {prefix}num_kv_heads is {kv_heads}; "
                    f"expected a divisor of num_heads = {self.num_heads}"
                )
            if (self.num_heads + 2 * kv_heads) * size >= 1 << 31:
                raise ValueError(
                    f"{op}: {self.num_heads} heads of {size}; expected fewer than 2^31 in all"
                )

    def _check_mixers(self, op: str) -> None:
        """Check what mixes tokens in each layer; attention alone has a window and positions."""
        for name in ("windows", "rotary"):
            entries = tuple(getattr(self, name))
            if len(entries) != self.num_layers:
                raise ValueError(
                    f"{op}: {name} has {len(entries)} entries; expected num_layers, "
                    f"{self.num_layers}"
                )
            object.__setattr__(self, name, entries)
        check_bool(op, "attention_beside", self.attention_beside)
        mixers = checked_mixers(
            op, self.mixers, self.num_layers, has_attention_beside=self.attention_beside
        )
        object.__setattr__(self, "mixers", mixers)
        check_bool(op, "attention_gate", self.attention_gate)
        if self.attention_beside and self.attention_gate:
            raise ValueError(f"{op}: attention_gate is True; expected False with attention_beside")
        for i in range(self.num_layers):
            if not self.has_attention(i) and (self.windows[i], self.rotary[i]) != (None, None):
                raise ValueError(
                    f"{op}: windows[{i}] and rotary[{i}] are {self.windows[i]} and "
                    f"{self.rotary[i]}; expected None, as mixers has no attention there"
                )

    def _check_positions(self, op: str) -> None:
        """Check the window and the rotary embedding of each layer."""
        for window in self.windows:
            if window is not None:
                check_int(op, "windows", window, 1, (1 << 31) - 1, limits="1 to 2^31 - 1, or None")
        object.__setattr__(self, "rotary_scales", tuple(map(float, self.rotary_scales)))
        for rotary in self.rotary:
            if rotary is not None:
                most = len(self.rotary_scales) - 1
                limits = f"0 to {most}, an entry of rotary_scales, or None"
                check_int(op, "rotary", rotary, 0, most, limits=limits)
        self._check_rotary_sizes(op)

    def _check_experts(self, op: str) -> None:
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

    def _check_rotary_sizes(self, op: str) -> None:
        is_turned = any(rotary is not None for rotary in self.rotary)
        if self.rotary_size is None:
            object.__setattr__(self, "rotary_size", self.head_size if is_turned else 0)
        if self.global_rotary_size is None:
            is_same = self.global_head_size == self.head_size
            size = self.rotary_size if is_same or not is_turned else self.global_head_size
            object.__setattr__(self, "global_rotary_size", size)
        for prefix in ("", "global_"):
            name, most = f"{prefix}rotary_size", getattr(self, f"{prefix}head_size")
            limits = f"0 to {prefix}head_size"
            size = check_int(op, name, getattr(self, name), 0, most, limits=limits)
            is_needed = any(
                rotary is not None and (window is None) == (prefix != "")
                for rotary, window in zip(self.rotary, self.windows, strict=True)
            )
            if size % 2 or (is_needed and size == 0):
                raise ValueError(f"{op}: {name} is {size}; expected an even number above 0")

    def _check_layers(self, op: str) -> None:
        """Check the settings of each layer: feed-forward layers, keys and values."""
        defaults: dict[str, Any] = {
            "ffn_sizes": self.ffn_size, "shared_keys": None, "keys_are_values": False,
        }  # fmt: skip
        for name, default in defaults.items():
            entries = tuple(getattr(self, name)) or (default,) * self.num_layers
            if len(entries) != self.num_layers:
                raise ValueError(
                    f"{op}: {name} has {len(entries)} entries; expected num_layers, "
                    f"{self.num_layers}, or none"
                )
            object.__setattr__(self, name, entries)
        for i, source in enumerate(self.shared_keys):
            check_int(op, "ffn_sizes", self.ffn_sizes[i], 1, self.ffn_size,
                      limits="1 to ffn_size")  # fmt: skip
            check_bool(op, "keys_are_values", self.keys_are_values[i])
            has_mixer = self.mixers[i] is not None
            if self.keys_are_values[i] and (has_mixer or self.attention_gate):
                raise ValueError(
                    f"{op}: keys_are_values[{i}] is True; expected False in a layer with a mixer, "
                    "and with attention_gate"
                )
            if source is None:
                continue
            limits = f"0 to {i - 1}, a layer before layer {i}, or None"
            check_int(op, "shared_keys", source, 0, i - 1, limits=limits)
            are_of_a_kind = (self.windows[i] is None) == (self.windows[source] is None)
            if (has_mixer or self.keys_are_values[i] or self.mixers[source] is not None
                    or self.shared_keys[source] is not None or not are_of_a_kind):  # fmt: skip
                raise ValueError(
                    f"{op}: shared_keys[{i}] is {source}; expected a layer with keys of its own, "
                    "and with a window just where this one has one, in a layer with attention "
                    "whose keys_are_values is False"
                )

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention: alone, or beside a mixer."""
        return self.attention_beside or self.mixers[layer] is None

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward layer of a layer consists of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def heads(self, layer: int) -> Heads:
        """Return the sizes of the heads of a layer with attention."""
        window = self.windows[layer]
        return self.heads_of(has_window=window is not None)

    def heads_of(self, *, has_window: bool) -> Heads:
        """Return the sizes of heads of layers with a window, or of those without."""
        sizes = (self.num_kv_heads, self.head_size, self.rotary_size)
        of_global = (self.global_num_kv_heads, self.global_head_size, self.global_rotary_size)
        return Heads(self.num_heads, *(sizes if has_window else of_global))  # type: ignore[arg-type]

    def projected_of(self, layer: int) -> int:
        """Features of a layer's queries and, where it has them, keys, values and the gate."""
        heads, has_own = self.heads(layer), self.shared_keys[layer] is None
        keys = 0 if not has_own else 1 if self.keys_are_values[layer] else 2
        return heads.query_size * (1 + self.attention_gate) + keys * heads.key_size

    @property
    def query_size(self) -> int:
        """Features of all query heads of ``head_size``."""
        return self.heads_of(has_window=True).query_size

    @property
    def projected_size(self) -> int:
        """Features of the queries, keys, values and, if there is one, the gate of these heads."""
        return self.query_size * (1 + self.attention_gate) + 2 * self.key_size

    @property
    def key_size(self) -> int:
        """Features of all key heads, and of all value heads, of ``num_kv_heads``."""
        return self.heads_of(has_window=True).key_size


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
