"""Configs of models: the sizes and switches that say what its weights mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lmdecode._checks import check_bool, check_choice, check_int, check_number
from lmdecode.linear import ACTIVATIONS
from lmdecode.models.mixers import Mixer, checked_mixers

__all__ = ["ActivationName", "CausalConfig", "DecoderConfig", "EncoderConfig", "ExpertsConfig",
           "Heads", "Norm", "Router"]  # fmt: skip

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


Router = Literal["softmax", "softmax_of_chosen", "sigmoid"]
ROUTERS = ("softmax", "softmax_of_chosen", "sigmoid")


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and switches of feed-forward layers that consist of experts.

    A token's output is ``sum(weight * expert(x))`` over the experts that its router chose, and
    ``shared(x)``, if there is a shared expert. An expert is ``down(activation(gate(x)) * up(x))``
    with the model's activation. ``num_chosen`` is the experts of a token, ``size`` the inner
    features of one; ``layers`` says which layers have experts. Raises ValueError or TypeError that
    names the argument.

    ``router`` says what weights are: the "softmax" of the logits of all experts, the
    "softmax_of_chosen" ones, or the "sigmoid" of each. The largest are chosen, after
    ``router_choice_bias`` is added, which is no part of the weights; ties go to the lower index.
    With ``normalized``, weights are then divided by their sum + ``epsilon`` (for "sigmoid" alone),
    and at last multiplied by ``scale``.

    With ``alpha`` and ``limit``, an expert is ``down(g * sigmoid(alpha * g) * (u + 1))``, where
    ``g`` is ``min(gate(x), limit)`` and ``u`` is ``up(x)`` clamped to ``-limit`` and ``limit``.
    ``shared_size`` is the inner features of the shared expert (its weights are ``ffn_up`` and so
    on); 0: none.
    """

    num_experts: int
    num_chosen: int
    size: int
    layers: tuple[bool, ...]
    router: Router = "softmax"
    normalized: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    alpha: float | None = None
    limit: float | None = None
    shared_size: int = 0

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "ExpertsConfig"
        check_int(op, "num_experts", self.num_experts, 1, 1 << 16, limits="1 to 65536")
        check_int(op, "num_chosen", self.num_chosen, 1, self.num_experts,
                  limits="1 to num_experts")  # fmt: skip
        limits = "0 to 2^31 - 1"
        check_int(op, "size", self.size, 1, (1 << 31) - 1, limits="1 to 2^31 - 1")
        check_int(op, "shared_size", self.shared_size, 0, (1 << 31) - 1, limits=limits)
        object.__setattr__(self, "layers", tuple(self.layers))
        for is_of_experts in self.layers:
            check_bool(op, "layers", is_of_experts)
        check_bool(op, "normalized", self.normalized)
        check_choice(op, "router", self.router, ROUTERS)
        if (self.alpha is None) != (self.limit is None):
            raise ValueError(
                f"{op}: alpha is {self.alpha} and limit is {self.limit}; expected both, or none"
            )
        for name in ("epsilon", "scale", "alpha", "limit"):
            value = getattr(self, name)
            if value is None:
                continue
            number = check_number(op, name, value)
            if not math.isfinite(number) or (name in ("epsilon", "limit") and number < 0):
                expected = " of at least 0" if name in ("epsilon", "limit") else ""
                raise ValueError(f"{op}: {name} is {number}; expected a finite number{expected}")
            object.__setattr__(self, name, number)
        if self.epsilon and self.router != "sigmoid":
            raise ValueError(f"{op}: epsilon is {self.epsilon}; expected 0 with {self.router!r}")


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
    ffn_beside : bool
        ``x += attention(norm(x)) + ffn(norm(x))``: both read the same x, each with a norm of its
        own. A mixer may stand in attention's place. There are no experts.

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
    ffn_beside: bool = False

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
        check_bool(op, "ffn_beside", self.ffn_beside)
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
            if self.ffn_beside:
                raise ValueError(f"{op}: ffn_beside is True; expected False with experts")

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


@dataclass(frozen=True)
class _Stack:
    """The sizes of decoders with cross-attention and of encoders."""

    num_layers: int
    model_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int

    @property
    def attention_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_size


@dataclass(frozen=True)
class DecoderConfig(_Stack):
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


@dataclass(frozen=True)
class EncoderConfig(_Stack):
    """Sizes and switches of an encoder; ``DecoderConfig`` explains the fields that it has, too.

    ``vocab_size`` is 0 if the encoder reads rows of ``model_size`` features instead of tokens;
    these are scaled by ``embedding_scale``, too. ``position_offset`` is the row of the position
    table for position 0. Raises ValueError or TypeError that names the argument.
    """

    norm: Norm = "layer_norm"
    norm_first: bool = False
    norm_epsilon: float = 1e-5
    activation: ActivationName = "relu"
    gated: bool = False
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    position_offset: int = 0

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "EncoderConfig"
        check_sizes(op, self, "num_layers", "model_size", "num_heads", "head_size", "ffn_size")
        check_sizes(op, self, "vocab_size", "position_offset", least=0)
        check_switches(op, self)
        check_numbers(op, self, "norm_epsilon", "attention_scale", "embedding_scale")
