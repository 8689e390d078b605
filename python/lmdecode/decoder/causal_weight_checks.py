"""Shapes of a decoder-only model's weights, and the checks of weights that come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lmdecode.decoder.causal_config import CausalConfig, CausalLayerWeights
from lmdecode.decoder.mixers import GatedDeltaRule, Mixer
from lmdecode.linear.quantized_weight import JoinedWeight, LinearWeight, QuantizedWeight

__all__ = ["check_layer", "check_weight", "expert_shapes", "linear_shapes", "state_shapes"]

_MOST_PARTS = 4  # of a linear weight, as in csrc/decoder/decoder_config.h


def _shape_error(name: str, tensor: LinearWeight, expected: Iterable[int]) -> ValueError:
    return ValueError(
        f"Decoding: weights.{name} has shape {list(tensor.shape)}; expected {list(expected)}"
    )


def check_weight(
    name: str, tensor: LinearWeight | None, *shapes: tuple[int, ...], optional: bool
) -> None:
    """Raise ValueError or TypeError for a weight of another type, shape, dtype or device."""
    if isinstance(tensor, (QuantizedWeight, JoinedWeight)):
        if tensor.shape not in shapes:
            raise _shape_error(name, tensor, shapes[0])
        most = 1 if name in ("embedding", "logits") else _MOST_PARTS
        if isinstance(tensor, JoinedWeight) and len(tensor.parts) > most:
            raise ValueError(
                f"Decoding: weights.{name} has {len(tensor.parts)} parts; expected {most} at most"
            )
        return
    if tensor is None:
        if optional:
            return
        raise ValueError(f"Decoding: weights.{name} is None; expected a tensor")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"Decoding: weights.{name} has type {type(tensor).__name__}; expected a tensor"
        )
    if tensor.shape not in shapes:
        raise _shape_error(name, tensor, shapes[0])
    if not tensor.is_floating_point():
        raise ValueError(f"Decoding: weights.{name} has dtype {tensor.dtype}; expected floats")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"Decoding: weights.{name} is on {tensor.device}; expected cpu, where decoder-only "
            "models run"
        )


def linear_shapes(config: CausalConfig, layer: int | None = None) -> dict[str, tuple[int, int]]:
    """Return the shape of each linear weight, which is packed; ``logits`` is the model's.

    Of that layer; None: of one with attention and without experts. Where a layer with experts has
    no shared one, ``ffn_up`` and so on are of size 0.
    """
    size, ffn = config.model_size, config.ffn_size
    mixer = None if layer is None else config.mixers[layer]
    if layer is not None and config.experts is not None and config.experts.layers[layer]:
        ffn = config.experts.shared_size
    return {
        "qkv": (config.projected_size if mixer is None else mixer.projected, size),
        "attention_out": (size, config.query_size if mixer is None else mixer.mixed),
        "ffn_up": (ffn, size),
        "ffn_gate": (ffn, size),
        "ffn_down": (size, ffn),
        "logits": (config.vocab_size, size),
    }


_STATE_FIELDS = ("convolution", "convolution_bias", "decay", "decay_bias", "mixer_norm_gamma")
_ATTENTION_FIELDS = ("query_norm_gamma", "key_norm_gamma", "sinks")


def state_shapes(mixer: Mixer | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that only a layer with this mixer has."""
    if mixer is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "convolution": (mixer.channels, mixer.taps),
        "convolution_bias": (mixer.channels,),
    }
    if isinstance(mixer, GatedDeltaRule):
        heads = (mixer.num_value_heads,)
        shapes |= {"decay": heads, "decay_bias": heads, "mixer_norm_gamma": (mixer.value_size,)}
    return shapes


def expert_shapes(config: CausalConfig) -> dict[str, tuple[int, int]]:
    """Return the shape of each matrix of an expert."""
    if config.experts is None:
        return {}
    size, inner = config.model_size, config.experts.size
    return {"experts_gate": (inner, size), "experts_up": (inner, size),
            "experts_down": (size, inner)}  # fmt: skip


def _unwanted(config: CausalConfig, number: int) -> dict[str, str]:
    """Return the weights that a layer cannot have, and why."""
    c, mixer = config, config.mixers[number]
    of_mixer = state_shapes(mixer)
    why = f"the layer has {'attention' if mixer is None else mixer.kind}"
    unwanted = {field: why for field in _STATE_FIELDS if field not in of_mixer}
    if mixer is not None:
        unwanted |= dict.fromkeys(_ATTENTION_FIELDS, why)
    if not c.has_experts(number):
        fields = [f for f in CausalLayerWeights._fields if f.startswith(("router", "experts_"))]
        unwanted |= dict.fromkeys((*fields, "shared_gate"), "the layer has no experts")
    elif c.experts is not None and c.experts.shared_size == 0:
        fields = ["ffn_up", "ffn_gate", "ffn_down"]
        fields += [f"{field}_bias" for field in fields]
        unwanted |= dict.fromkeys((*fields, "shared_gate"), "the layer has no shared expert")
    if not c.gated:
        unwanted["ffn_gate"] = "not gated"
    return unwanted


def check_layer(config: CausalConfig, name: str, layer: CausalLayerWeights, number: int) -> None:
    """Raise ValueError or TypeError for weights that layer ``number`` cannot have."""
    c, has_experts = config, config.has_experts(number)
    unwanted = _unwanted(c, number)
    for field, why in unwanted.items():
        if getattr(layer, field) is not None:
            raise ValueError(f"Decoding: weights.{name}.{field} was given; expected none, as {why}")
    linear, of_mixer = linear_shapes(c, number), state_shapes(c.mixers[number])
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "query_norm_gamma": ((c.head_size,), (c.query_size,)),
        "key_norm_gamma": ((c.head_size,), (c.key_size,)),
        "sinks": ((c.num_heads,),),
        **{field: (shape,) for field, shape in of_mixer.items()},
    }
    for field, shape in linear.items():
        shapes[field], shapes[f"{field}_bias"] = (shape,), (shape[:1],)
    if has_experts:
        shapes |= _shapes_of_experts(c)
    needed = {*linear, *of_mixer, *(("router",) if has_experts else ())} - {"convolution_bias"}
    matrices = expert_shapes(c) if has_experts else {}
    for field, value in layer._asdict().items():
        if field in unwanted:
            continue
        if field in matrices:
            _check_matrices(c, f"{name}.{field}", value)
        else:
            expected = shapes.get(field, ((c.model_size,),))
            check_weight(f"{name}.{field}", value, *expected, optional=field not in needed)


def _shapes_of_experts(c: CausalConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    assert c.experts is not None
    count = c.experts.num_experts
    biases: dict[str, tuple[tuple[int, ...], ...]] = {
        f"{field}_bias": ((count, shape[0]),) for field, shape in expert_shapes(c).items()
    }
    return {
        **biases,
        "router": ((count, c.model_size),),
        "router_bias": ((count,),),
        "router_choice_bias": ((count,),),
    }


def _check_matrices(c: CausalConfig, name: str, matrices: Any) -> None:
    assert c.experts is not None
    if matrices is None or len(matrices) != c.experts.num_experts:
        have = "None" if matrices is None else f"of {len(matrices)} matrices"
        raise ValueError(
            f"Decoding: weights.{name} is {have}; expected {c.experts.num_experts}, one an expert"
        )
