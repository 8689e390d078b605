"""Layers with a state, in place of attention or beside it, for decoder-only models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmdecode._checks import check_bool, check_choice, check_int

__all__ = [
    "GatedDeltaRule",
    "Mamba2",
    "Mixer",
    "ShortConvolution",
    "checked_mixers",
]

_MOST_TAPS = 16  # as in kMostTaps in csrc/decoder


@dataclass(frozen=True)
class ShortConvolution:
    """A causal convolution of each feature, between two gates.

    The projection gives B, C and x, each [model_size]. The layer's output is ``C * conv(B * x)``.
    ``size`` is ``model_size``; ``taps`` counts the tokens that the convolution reads, with the
    current one.
    """

    size: int
    taps: int
    kind: Literal["short_convolution"] = "short_convolution"

    def __post_init__(self) -> None:
        """Check every argument."""
        check_choice("ShortConvolution", "kind", self.kind, ("short_convolution",))
        check_int("ShortConvolution", "size", self.size, 1)
        check_int("ShortConvolution", "taps", self.taps, 1, _MOST_TAPS, limits="1 to 16")

    @property
    def channels(self) -> int:
        """Features that the convolution sees."""
        return self.size

    @property
    def projected(self) -> int:
        """Features that the layer's first projection gives."""
        return 3 * self.size

    @property
    def mixed(self) -> int:
        """Features that its last projection takes."""
        return self.size

    @property
    def state_size(self) -> int:
        """Float32 numbers of a sequence's state: the convolution's last inputs, [taps - 1, C]."""
        return (self.taps - 1) * self.channels


@dataclass(frozen=True)
class GatedDeltaRule:
    """A gated delta rule after a causal convolution: Gated DeltaNet.

    The projection gives queries and keys [num_key_heads, key_size] each, values [num_value_heads,
    value_size], then the output gate z of the values' shape, then b and a, [num_value_heads] each.
    A convolution and SiLU act on queries, keys and values. Each value head has a state S [key_size,
    value_size]; q and k are scaled to length 1, and q by ``key_size ** -0.5``:

        S = exp(decay * softplus(a + decay_bias)) S
        S += k (sigmoid(b) (v - S^T k))^T
        out = rms_norm(S^T q) * silu(z)

    A key head serves ``num_value_heads / num_key_heads`` consecutive value heads. ``taps`` counts
    the tokens that the convolution reads, with the current one.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    taps: int
    kind: Literal["gated_delta_rule"] = "gated_delta_rule"

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "GatedDeltaRule"
        check_choice(op, "kind", self.kind, ("gated_delta_rule",))
        for name in ("num_key_heads", "num_value_heads"):
            check_int(op, name, getattr(self, name), 1, 1 << 16, limits="1 to 2^16")
        for name in ("key_size", "value_size"):
            check_int(op, name, getattr(self, name), 1, 1024, limits="1 to 1024")
        check_int(op, "taps", self.taps, 1, _MOST_TAPS, limits="1 to 16")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"{op}: num_key_heads is {self.num_key_heads}; expected a divisor of "
                f"num_value_heads = {self.num_value_heads}"
            )

    @property
    def channels(self) -> int:
        """Features that the convolution sees: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.mixed

    @property
    def projected(self) -> int:
        """Features that the layer's first projection gives."""
        return self.channels + self.mixed + 2 * self.num_value_heads

    @property
    def mixed(self) -> int:
        """Features that its last projection takes."""
        return self.num_value_heads * self.value_size

    @property
    def state_size(self) -> int:
        """Float32 numbers of a sequence's state: the convolution's, then S of each value head."""
        return (self.taps - 1) * self.channels + self.mixed * self.key_size


@dataclass(frozen=True)
class Mamba2:
    """The state space of Mamba-2 after a causal convolution.

    The projection gives the gate z and x, [num_heads, value_size] each, then B and C [num_groups,
    key_size] each, then dt [num_heads]. A convolution and SiLU act on x, B and C. Each head has a
    state H [key_size, value_size], and uses its group's B and C:

        step = softplus(dt + decay_bias), not below least_step nor above most_step
        H = exp(decay * step) H + B (step x)^T
        out = H^T C + mixer_skip x

    The layer returns ``norm(out * silu(z))``, with ``norm_first`` ``norm(out) * silu(z)``: an RMS
    norm of each group's features, if there is a ``mixer_norm_gamma``. A group has ``num_heads /
    num_groups`` consecutive heads. ``taps`` counts the tokens that the convolution reads, with the
    current one. ``most_step`` may be infinite.
    """

    num_groups: int
    num_heads: int
    key_size: int
    value_size: int
    taps: int
    norm_first: bool = False
    least_step: float = 0.0
    most_step: float = math.inf
    kind: Literal["mamba2"] = "mamba2"

    def __post_init__(self) -> None:
        """Check every argument."""
        op = "Mamba2"
        check_choice(op, "kind", self.kind, ("mamba2",))
        for name in ("num_groups", "num_heads"):
            check_int(op, name, getattr(self, name), 1, 1 << 16, limits="1 to 2^16")
        for name in ("key_size", "value_size"):
            check_int(op, name, getattr(self, name), 1, 1024, limits="1 to 1024")
        check_int(op, "taps", self.taps, 1, _MOST_TAPS, limits="1 to 16")
        check_bool(op, "norm_first", self.norm_first)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"{op}: num_groups is {self.num_groups}; expected a divisor of "
                f"num_heads = {self.num_heads}"
            )
        for name in ("least_step", "most_step"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not 0 <= self.least_step <= self.most_step:
            raise ValueError(
                f"{op}: least_step and most_step are {self.least_step} and {self.most_step}; "
                "expected 0 to infinity, in ascending order"
            )

    @property
    def channels(self) -> int:
        """Features that the convolution sees: x, B and C."""
        return self.mixed + 2 * self.num_groups * self.key_size

    @property
    def projected(self) -> int:
        """Features that the layer's first projection gives."""
        return self.mixed + self.channels + self.num_heads

    @property
    def mixed(self) -> int:
        """Features that its last projection takes."""
        return self.num_heads * self.value_size

    @property
    def state_size(self) -> int:
        """Float32 numbers of a sequence's state: the convolution's, then H of each head."""
        return (self.taps - 1) * self.channels + self.mixed * self.key_size


Mixer = ShortConvolution | GatedDeltaRule | Mamba2
_KINDS: dict[str, Any] = {
    "short_convolution": ShortConvolution,
    "gated_delta_rule": GatedDeltaRule,
    "mamba2": Mamba2,
}


def _mixer(op: str, value: object) -> Mixer | None:
    if isinstance(value, Mapping) and value.get("kind") in _KINDS:  # as dataclasses.asdict() is
        made: Mixer = _KINDS[value["kind"]](**value)
        return made
    if value is None or isinstance(value, (ShortConvolution, GatedDeltaRule, Mamba2)):
        return value
    raise TypeError(
        f"{op}: mixers has an entry of type {type(value).__name__}; expected ShortConvolution, "
        "GatedDeltaRule, Mamba2 or None"
    )


def checked_mixers(
    op: str, values: Sequence[object], num_layers: int, *, has_attention_beside: bool
) -> tuple[Mixer | None, ...]:
    """Return a mixer of each layer, None for attention; an empty sequence is attention everywhere.

    If attention is beside the mixers, every layer has a ``Mamba2``. Raises ValueError or TypeError
    for another number of entries, no layer with attention, mixers that differ, or, beside
    attention, anything but ``Mamba2``.
    """
    mixers = tuple(_mixer(op, value) for value in values) or (None,) * num_layers
    if len(mixers) != num_layers:
        raise ValueError(f"{op}: mixers has {len(mixers)} entries; expected {num_layers}, or none")
    if has_attention_beside:
        if not all(isinstance(mixer, Mamba2) for mixer in mixers):
            raise ValueError(f"{op}: attention_beside is True; expected a Mamba2 in every layer")
    elif None not in mixers:
        raise ValueError(f"{op}: mixers has no None; expected a layer with attention at least")
    kinds = {mixer for mixer in mixers if mixer is not None}
    if len(kinds) > 1:
        raise ValueError(f"{op}: mixers has {len(kinds)} different mixers; expected one at most")
    return mixers
