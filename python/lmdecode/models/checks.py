"""Shapes of a model's weights, and checks made before any of them is packed or moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lmdecode._checks import check_dense_tensor, dtype_name, type_error
from lmdecode.linear.quantized_weight import JoinedWeight, LinearWeight, QuantizedWeight
from lmdecode.models.configs import CausalConfig, DecoderConfig, Heads
from lmdecode.models.mixers import GatedDeltaRule, Mamba2, Mixer
from lmdecode.models.weights import (
    LINEAR_FIELDS,
    CausalLayerWeights,
    CausalWeights,
    DecoderWeights,
    LayerWeights,
)

__all__ = [
    "check_fields", "check_floats", "check_layer", "check_model", "check_stack_layer",
    "check_weight", "check_weights", "expert_shapes", "linear_shapes", "model_shapes",
    "norms_of_all_heads", "stack_shapes", "state_shapes",
]  # fmt: skip

# --- Decoder-only models --------------------------------------------------------------------------

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


def linear_shapes(config: CausalConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the shape of each linear weight of a layer, which is packed.

    Where a layer with experts has no shared one, ``ffn_up`` and so on are of size 0.
    """
    size, mixer, inputs = config.model_size, config.mixers[layer], config.per_layer_size
    ffn = config.ffn_sizes[layer]
    if config.experts is not None and config.experts.layers[layer]:
        ffn = config.experts.shared_size
    projected = mixed = 0
    if config.has_attention(layer):
        projected, mixed = config.projected_of(layer), config.heads(layer).query_size
    if mixer is not None:
        projected, mixed = projected + mixer.projected, mixed + mixer.mixed
    shapes = {
        "qkv": (projected, size),
        "attention_out": (size, mixed),
        "ffn_up": (ffn, size),
        "ffn_gate": (ffn, size),
        "ffn_down": (size, ffn),
    }
    if inputs:
        shapes |= {"per_layer_gate": (inputs, size), "per_layer_out": (size, inputs)}
    return shapes


def model_shapes(config: CausalConfig) -> dict[str, tuple[int, int]]:
    """Return the shape of each weight of the model, not of a layer, that may be packed."""
    c, inputs = config, config.num_layers * config.per_layer_size
    shapes = dict.fromkeys(("embedding", "logits"), (c.vocab_size, c.model_size))
    if inputs:
        shapes["per_layer_embedding"] = (c.vocab_size, inputs)
        shapes["per_layer_projection"] = (inputs, c.model_size)
    square = (c.model_size, c.model_size)
    return {**shapes, "embedding_projection": square, "hidden_projection": square}


_STATE_FIELDS = ("convolution", "convolution_bias", "decay", "decay_bias", "mixer_norm_gamma",
                 "mixer_skip")  # fmt: skip
_NORMS_OF_EXPERTS = ("router_norm_gamma", "experts_norm_gamma", "experts_out_norm_gamma",
                     "shared_out_norm_gamma")  # fmt: skip
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
    elif isinstance(mixer, Mamba2):
        shapes |= dict.fromkeys(("decay", "decay_bias", "mixer_skip"), (mixer.num_heads,))
        shapes["mixer_norm_gamma"] = (mixer.mixed,)
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
    if not c.has_attention(number):
        unwanted |= dict.fromkeys(_ATTENTION_FIELDS, why)
    if not c.has_experts(number):
        fields = [f for f in CausalLayerWeights._fields if f.startswith(("router", "experts_"))]
        unwanted |= dict.fromkeys(
            (*fields, *_NORMS_OF_EXPERTS, "shared_gate"), "the layer has no experts"
        )
    elif c.experts is not None and c.experts.shared_size == 0:
        fields = ["ffn_up", "ffn_gate", "ffn_down"]
        fields += [f"{field}_bias" for field in fields]
        unwanted |= dict.fromkeys(
            (*fields, *_NORMS_OF_EXPERTS, "shared_gate"), "the layer has no shared expert"
        )
    if not c.gated:
        unwanted["ffn_gate"] = "not gated"
    if not c.per_layer_size:
        fields = [f for f in CausalLayerWeights._fields if f.startswith("per_layer_")]
        unwanted |= dict.fromkeys(fields, "per_layer_size is 0")
    if c.shared_keys[number] is not None:
        unwanted["key_norm_gamma"] = "the layer has no keys of its own"
    return unwanted


def check_layer(config: CausalConfig, name: str, layer: CausalLayerWeights, number: int) -> None:
    """Raise ValueError or TypeError for weights that layer ``number`` cannot have."""
    c, has_experts = config, config.has_experts(number)
    unwanted = _unwanted(c, number)
    for field, why in unwanted.items():
        if getattr(layer, field) is not None:
            raise ValueError(f"Decoding: weights.{name}.{field} was given; expected none, as {why}")
    linear, of_mixer = linear_shapes(c, number), state_shapes(c.mixers[number])
    heads = c.heads(number)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "query_norm_gamma": ((heads.head_size,), (heads.query_size,)),
        "key_norm_gamma": ((heads.head_size,), (heads.key_size,)),
        "sinks": ((c.num_heads,),),
        "layer_scale": ((1,),),
        **{field: (shape,) for field, shape in of_mixer.items()},
    }
    for field, shape in linear.items():
        shapes[field], shapes[f"{field}_bias"] = (shape,), (shape[:1],)
    if has_experts:
        shapes |= _shapes_of_experts(c)
    needed = {*linear, *of_mixer, *(("router",) if has_experts else ())} - {"convolution_bias"}
    if isinstance(c.mixers[number], Mamba2):
        needed -= {"mixer_norm_gamma"}
    matrices = expert_shapes(c) if has_experts else {}
    for field, value in layer._asdict().items():
        if field in unwanted:
            continue
        if field in matrices:
            _check_matrices(c, f"{name}.{field}", value)
        else:
            expected = shapes.get(field, ((c.model_size,),))
            check_weight(f"{name}.{field}", value, *expected, optional=field not in needed)
    if has_experts:
        _check_norms_of_experts(name, layer)


def _check_norms_of_experts(name: str, layer: CausalLayerWeights) -> None:
    are_there = [getattr(layer, field) is not None for field in _NORMS_OF_EXPERTS]
    if any(are_there) and not (all(are_there) and layer.ffn_out_norm_gamma is not None):
        raise ValueError(
            f"Decoding: weights.{name} have some of {', '.join(_NORMS_OF_EXPERTS)}; expected none, "
            "or all with ffn_out_norm_gamma"
        )


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
        "router_scale": ((count,),),
    }


def _check_matrices(c: CausalConfig, name: str, matrices: Any) -> None:
    assert c.experts is not None
    if matrices is None or len(matrices) != c.experts.num_experts:
        have = "None" if matrices is None else f"of {len(matrices)} matrices"
        raise ValueError(
            f"Decoding: weights.{name} is {have}; expected {c.experts.num_experts}, one an expert"
        )


def norms_of_all_heads(heads: Heads, layer: CausalLayerWeights) -> bool | None:
    """Return whether norms of queries and keys are of all heads as one row; None: either fits."""
    for gamma, count in (
        (layer.query_norm_gamma, heads.num_heads),
        (layer.key_norm_gamma, heads.num_kv_heads),
    ):
        if gamma is not None and count > 1:
            return bool(gamma.shape[0] != heads.head_size)
    return None


def _check_per_layer(config: CausalConfig, weights: CausalWeights) -> None:
    """Raise ValueError or TypeError for other weights of layers' inputs than the config has."""
    size, shapes = config.per_layer_size, model_shapes(config)
    for name in ("per_layer_embedding", "per_layer_projection", "per_layer_norm_gamma"):
        value = getattr(weights, name)
        if size:
            check_weight(name, value, shapes.get(name, (size,)), optional=False)
        elif value is not None:
            raise ValueError(
                f"Decoding: weights.{name} was given; expected none, as per_layer_size is 0"
            )


_HIDDEN_INPUT = ("embedding_norm_gamma", "hidden_norm_gamma", "embedding_projection",
                 "hidden_projection")  # fmt: skip


def _check_hidden_input(config: CausalConfig, weights: CausalWeights) -> None:
    """Raise ValueError or TypeError for weights of a projection of hidden rows, unless all fit."""
    shapes, given = model_shapes(config), weights._asdict()
    is_optional = all(given[name] is None for name in _HIDDEN_INPUT)
    for name in _HIDDEN_INPUT:
        shape = shapes.get(name, (config.model_size,))
        check_weight(name, given[name], shape, optional=is_optional)


def check_model(config: CausalConfig, weights: CausalWeights) -> None:
    """Raise ValueError or TypeError for weights of a model, but its layers', that do not fit."""
    c, shapes = config, model_shapes(config)
    check_weight("embedding", weights.embedding, shapes["embedding"], optional=False)
    if weights.positions is not None:
        shape = (len(weights.positions), c.model_size)
        check_weight("positions", weights.positions, shape, optional=False)
    if len(weights.rotary) != len(c.rotary_scales):
        raise ValueError(
            f"Decoding: weights.rotary has {len(weights.rotary)} entries; expected "
            f"{len(c.rotary_scales)}, as rotary_scales has"
        )
    for i, frequencies in enumerate(weights.rotary):
        sizes = {c.heads(layer).rotary_size for layer, r in enumerate(c.rotary) if r == i}
        for size in sorted(sizes) or [2 * frequencies.numel()]:
            check_weight(f"rotary[{i}]", frequencies, (size // 2,), optional=False)
    for name in ("final_norm_gamma", "final_norm_beta"):
        check_weight(name, getattr(weights, name), (c.model_size,), optional=True)
    check_weight("logits", weights.logits, shapes["logits"], optional=True)
    _check_per_layer(c, weights)
    _check_hidden_input(c, weights)
    check_weight("logits_bias", weights.logits_bias, (c.vocab_size,), optional=True)
    if len(weights.layers) != c.num_layers:
        raise ValueError(
            f"Decoding: weights.layers has {len(weights.layers)} entries; expected "
            f"num_layers, {c.num_layers}"
        )


# --- Decoders with cross-attention, and encoders --------------------------------------------------

_OP = "DecoderWeights"
_Shape = tuple[int | None, ...]  # None: any size above 0


def check_floats(op: str, name: str, value: object) -> None:
    """Raise for anything but a dense tensor of floats with values."""
    check_dense_tensor(op, name, value)
    assert isinstance(value, Tensor)
    if not value.is_floating_point():
        raise ValueError(f"{op}: {name} has dtype {dtype_name(value)}; expected floats")
    if value.device.type == "meta":
        raise ValueError(f"{op}: {name} is on meta; expected a tensor with values")


def stack_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """Return the shape of each linear weight of a decoder or an encoder."""
    size, attention = config.model_size, config.attention_size
    shapes = {
        "qkv": (3 * attention, size),
        "self_out": (size, attention),
        "ffn_up": (config.ffn_size, size),
        "ffn_gate": (config.ffn_size, size),
        "ffn_down": (size, config.ffn_size),
    }
    if isinstance(config, DecoderConfig):
        assert config.memory_size is not None
        shapes |= {
            "cross_query": (attention, size),
            "cross_key_value": (2 * attention, config.memory_size),
            "cross_out": (size, attention),
            "logits": (config.vocab_size, size),
        }
    return shapes


def check_fields(config: Any, fields: Mapping[str, object], op: str = _OP) -> None:
    """Check every linear weight, its bias, every norm, and tables, as far as they are there."""
    linear, bias, heads = stack_shapes(config), fields.get("relative_bias"), config.num_heads
    of_layers = config.num_layers * heads
    is_of_layers = isinstance(bias, Tensor) and bias.dim() == 2 and len(bias) == of_layers
    others: dict[str, _Shape] = {
        "embedding": (config.vocab_size, config.model_size),
        "positions": (None, config.model_size),
        "relative_bias": (of_layers if is_of_layers else heads, None),
    }
    for name, tensor in fields.items():
        shape: _Shape
        if name in linear:
            shape = linear[name]
        elif name.removesuffix("_bias") in linear:
            shape = linear[name.removesuffix("_bias")][:1]
        else:
            shape = others.get(name, (config.model_size,))
        if tensor is None and name not in LINEAR_FIELDS and name != "embedding":
            continue
        check_floats(op, name, tensor)
        assert isinstance(tensor, Tensor)
        fits = tensor.dim() == len(shape) and all(
            size == want or (want is None and size > 0)
            for size, want in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; expected [{expected}]")
        if name.endswith("_beta") and config.norm == "rms_norm":
            raise ValueError(f"{op}: {name} is a tensor; expected None with norm='rms_norm'")


def check_stack_layer(config: Any, layer: Any) -> None:
    """Raise TypeError or ValueError for the first tensor of a layer that does not fit.

    For a decoder, or an encoder (its layers have no cross-attention).
    """
    is_decoder = isinstance(config, DecoderConfig)
    if is_decoder and not isinstance(layer, LayerWeights):
        raise type_error(_OP, "a layer", layer, "LayerWeights")
    op = _OP if is_decoder else "EncoderWeights"
    fields = layer._asdict()
    if (layer.ffn_gate is None) == config.gated:
        raise ValueError(
            f"{op}: ffn_gate is {'None' if layer.ffn_gate is None else 'a tensor'}; "
            f"expected the opposite with gated={config.gated}"
        )
    if not config.gated:
        del fields["ffn_gate"]
        if fields.pop("ffn_gate_bias") is not None:
            raise ValueError(f"{op}: ffn_gate_bias is a tensor; expected None with gated=False")
    check_fields(config, fields, op)


def check_weights(config: DecoderConfig, weights: DecoderWeights) -> None:
    """Raise TypeError or ValueError for the first tensor that does not fit."""
    if not isinstance(config, DecoderConfig):
        raise type_error("Decoding", "config", config, "a DecoderConfig")
    if not isinstance(weights, DecoderWeights):
        raise type_error("Decoding", "weights", weights, "DecoderWeights")
    if len(weights.layers) != config.num_layers:
        raise ValueError(
            f"{_OP}: layers has {len(weights.layers)} entries; "
            f"expected num_layers, {config.num_layers}"
        )
    fields = weights._asdict()
    del fields["layers"]
    check_fields(config, fields)
    for norm in ("embedding_norm", "final_norm"):
        if fields[f"{norm}_gamma"] is None and fields[f"{norm}_beta"] is not None:
            raise ValueError(f"{_OP}: {norm}_beta is a tensor; expected None without its gamma")
    positions, offset = weights.positions, config.position_offset
    if positions is not None and positions.shape[0] <= offset:
        raise ValueError(
            f"{_OP}: positions has {positions.shape[0]} rows; expected more than {offset}, the "
            "position_offset"
        )
    for layer in weights.layers:
        check_stack_layer(config, layer)
