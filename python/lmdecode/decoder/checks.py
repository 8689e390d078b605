"""Checks of a decoder's weights, made before any of them is packed or moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_dense_tensors, dtype_name, type_error
from lmdecode.decoder.config import LINEAR_FIELDS, DecoderConfig, DecoderWeights, LayerWeights

__all__ = [
    "check_fields", "check_floats", "check_layer", "check_memory", "check_weights", "indices",
]  # fmt: skip

_OP = "DecoderWeights"
_Shape = tuple[int | None, ...]  # None: any size above 0


def check_floats(op: str, name: str, value: object) -> None:
    """Raise for anything but a dense tensor of floats with values."""
    check_dense_tensors(op, **{name: value})
    assert isinstance(value, Tensor)
    if not value.is_floating_point():
        raise ValueError(f"{op}: {name} has dtype {dtype_name(value)}; expected floats")
    if value.device.type == "meta":
        raise ValueError(f"{op}: {name} is on meta; expected a tensor with values")


def check_memory(op: str, memory: Any, size: int | None, source: int) -> None:
    """Raise ValueError for anything but a memory, [source or fewer, size] floats."""
    if not isinstance(memory, Tensor) or memory.dim() != 2 or memory.shape[1] != size:
        shape = list(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
        raise ValueError(f"{op}: memory is {shape}; expected a tensor [source, {size}]")
    check_floats(op, "memory", memory)
    if memory.shape[0] > source:
        raise ValueError(f"{op}: memory has {memory.shape[0]} positions; expected at most {source}")


def linear_shapes(config: Any) -> dict[str, tuple[int, int]]:
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
    linear, bias, heads = linear_shapes(config), fields.get("relative_bias"), config.num_heads
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


def check_layer(config: Any, layer: Any) -> None:
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
        check_layer(config, layer)


def indices(op: str, name: str, value: object, rows: int) -> Tensor:
    """Return [rows] integers as contiguous int32."""
    check_dense_tensors(op, **{name: value})
    assert isinstance(value, Tensor)
    if value.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{op}: {name} has dtype {dtype_name(value)}; expected integers")
    if tuple(value.shape) != (rows,):
        raise ValueError(f"{op}: {name} has shape {list(value.shape)}; expected [{rows}]")
    if value.device.type != "cpu":
        raise ValueError(f"{op}: {name} is on {value.device}; expected cpu")
    if rows and not 0 <= int(value.min()) <= int(value.max()) < 1 << 31:
        raise ValueError(f"{op}: {name} is {value.tolist()}; expected 0 to 2^31 - 1")
    return value.to(torch.int32).contiguous()
