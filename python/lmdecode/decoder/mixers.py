"""What stands where attention stands in layers of a decoder-only model that keep a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmdecode._checks import check_choice, check_int

__all__ = ["GatedDeltaRule", "Mixer", "ShortConvolution", "checked_mixers", "mixer_numbers"]

_MOST_TAPS = 16  # as in csrc/decoder/short_convolution.h


@dataclass(frozen=True)
class ShortConvolution:
    """A causal convolution of each feature, with a gate before it and one behind it.

    The projection gives B, C and x, each [model_size]. The layer's output is ``C * conv(B * x)``.

    Parameters
    ----------
    size : int
        Features, the model's.
    taps : int
        Tokens that the convolution sees, the token's own among them.
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
    """A gated delta rule behind a causal convolution: Gated DeltaNet.

    The projection gives queries and keys [num_key_heads, key_size] each, values
    [num_value_heads, value_size], then the output gate z of the values' shape, then b and a,
    [num_value_heads] each. A convolution and SiLU act on queries, keys and values. Of each value
    head with a state S [key_size, value_size], q and k of length 1, and q by ``key_size ** -0.5``:

        S = exp(decay * softplus(a + decay_bias)) S
        S += k (sigmoid(b) (v - S^T k))^T
        out = rms_norm(S^T q) * silu(z)

    Parameters
    ----------
    num_key_heads, num_value_heads, key_size, value_size : int
        Sizes; a key head is of ``num_value_heads / num_key_heads`` consecutive value heads.
    taps : int
        Tokens that the convolution sees, the token's own among them.
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


Mixer = ShortConvolution | GatedDeltaRule
_KINDS: dict[str, Any] = {
    "short_convolution": ShortConvolution,
    "gated_delta_rule": GatedDeltaRule,
}


def _mixer(op: str, value: object) -> Mixer | None:
    if isinstance(value, Mapping) and value.get("kind") in _KINDS:  # as dataclasses.asdict() is
        made: Mixer = _KINDS[value["kind"]](**value)
        return made
    if value is None or isinstance(value, (ShortConvolution, GatedDeltaRule)):
        return value
    raise TypeError(
        f"{op}: mixers has an entry of type {type(value).__name__}; expected ShortConvolution, "
        "GatedDeltaRule or None"
    )


def checked_mixers(op: str, values: Sequence[object], num_layers: int) -> tuple[Mixer | None, ...]:
    """Return a mixer of each layer, None for attention; an empty sequence is attention everywhere.

    Raises
    ------
    ValueError, TypeError
        Another number of entries, no layer with attention, or mixers that differ.
    """
    mixers = tuple(_mixer(op, value) for value in values) or (None,) * num_layers
    if len(mixers) != num_layers:
        raise ValueError(f"{op}: mixers has {len(mixers)} entries; expected {num_layers}, or none")
    if None not in mixers:
        raise ValueError(f"{op}: mixers has no None; expected a layer with attention at least")
    kinds = {mixer for mixer in mixers if mixer is not None}
    if len(kinds) > 1:
        raise ValueError(f"{op}: mixers has {len(kinds)} different mixers; expected one at most")
    return mixers


def mixer_numbers(mixers: Sequence[Mixer | None]) -> list[int]:
    """Return the layers' mixer as the ops take it: kind, heads, sizes and taps; zeros: none."""
    found = next((mixer for mixer in mixers if mixer is not None), None)
    if isinstance(found, ShortConvolution):
        return [1, 0, 0, 0, 0, found.taps]
    if isinstance(found, GatedDeltaRule):
        sizes = [found.num_key_heads, found.num_value_heads, found.key_size, found.value_size]
        return [2, *sizes, found.taps]
    return [0] * 6
