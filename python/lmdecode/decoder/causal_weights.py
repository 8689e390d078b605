"""The weights of a decoder-only model as its ops take them: packed, in one memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode.decoder.causal_config import CausalConfig, CausalLayerWeights, CausalWeights
from lmdecode.decoder.config import ACTIVATIONS, FORMATS, NORMS, format_number
from lmdecode.decoder.huge_memory import new_memory
from lmdecode.decoder.mixers import GatedDeltaRule, Mixer, mixer_numbers
from lmdecode.linear.formats import (
    AS_IT_IS,
    format_of_head,
    most_packed_bytes,
    pack_weight_into,
    parts_of_packed,
)
from lmdecode.linear.quantized_weight import JoinedWeight, LinearWeight, QuantizedWeight

__all__ = ["PackedCausalModel"]

_ALIGNMENT = 64  # bytes
_MOST_PARTS = 4  # of a linear weight, as in csrc/decoder/decoder_config.h
_NONE = -1
# The columns of a layout's row: four numbers, then the parts of a layer.
_NUM_COLUMNS = 4 + len(CausalLayerWeights._fields)
_EMBEDDING_FORMAT, _NORMS_ALL_HEADS = 15, 10  # in sizes
_FORMER_PARTS = (18,)  # of a layer in models that were saved before there were more
_NUM_MODEL_PARTS, _EMBEDDING, _LOGITS = 7, 0, 5  # in the layout's row of the model
# Formats of an embedding, as in csrc/decoder/causal_forward.h.
_IS_LOGITS, _IS_FLOAT32, _IS_BFLOAT16, _IS_PACKED = 0, 1, 2, 3
_EMBEDDINGS = {"float32": _IS_FLOAT32, "bfloat16": _IS_BFLOAT16}  # others are packed


def _shape_error(name: str, tensor: LinearWeight, expected: Iterable[int]) -> ValueError:
    return ValueError(
        f"Decoding: weights.{name} has shape {list(tensor.shape)}; expected {list(expected)}"
    )


def _check(
    name: str, tensor: LinearWeight | None, *shapes: tuple[int, ...], optional: bool
) -> None:
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


def linear_shapes(config: CausalConfig, mixer: Mixer | None = None) -> dict[str, tuple[int, int]]:
    """Return the shape of each linear weight, which is packed; ``logits`` is the model's.

    Of a layer with attention, or with a mixer.
    """
    size, ffn = config.model_size, config.ffn_size
    projected = config.projected_size if mixer is None else mixer.projected
    return {
        "qkv": (projected, size),
        "attention_out": (size, config.query_size if mixer is None else mixer.mixed),
        "ffn_up": (ffn, size),
        "ffn_gate": (ffn, size),
        "ffn_down": (size, ffn),
        "logits": (config.vocab_size, size),
    }


def _check_layer(
    config: CausalConfig, name: str, layer: CausalLayerWeights, mixer: Mixer | None
) -> None:
    c, linear = config, linear_shapes(config, mixer)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "query_norm_gamma": ((c.head_size,), (c.query_size,)),
        "key_norm_gamma": ((c.head_size,), (c.key_size,)),
    }
    of_mixer = state_shapes(mixer)
    shapes |= {field: (shape,) for field, shape in of_mixer.items()}
    foreign = set(_STATE_FIELDS) - of_mixer.keys()
    foreign |= {"query_norm_gamma", "key_norm_gamma"} if mixer is not None else set()
    for field in sorted(foreign):
        if getattr(layer, field) is not None:
            raise ValueError(
                f"Decoding: weights.{name}.{field} was given; expected none, as the layer has "
                f"{'attention' if mixer is None else mixer.kind}"
            )
    for field, shape in linear.items():
        shapes[field], shapes[f"{field}_bias"] = (shape,), (shape[:1],)
    for field, tensor in layer._asdict().items():
        optional = field not in linear or (field == "ffn_gate" and not c.gated)
        optional &= field not in of_mixer or field == "convolution_bias"
        _check(f"{name}.{field}", tensor, *shapes.get(field, ((c.model_size,),)), optional=optional)
    if not c.gated and layer.ffn_gate is not None:
        raise ValueError(
            f"Decoding: weights.{name}.ffn_gate was given; expected none, as not gated"
        )


_STATE_FIELDS = ("convolution", "convolution_bias", "decay", "decay_bias", "mixer_norm_gamma")


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


def _checked_format(weight_format: object) -> str:
    """Return the name of a format; None: each weight has that in which it came."""
    if weight_format is None:
        return AS_IT_IS
    return check_format("Decoding", weight_format, FORMATS)


def _norms_all_heads(config: CausalConfig, layer: CausalLayerWeights) -> bool | None:
    """Whether norms of queries and keys are of all heads as one row; None: either is right."""
    for gamma, heads in (
        (layer.query_norm_gamma, config.num_heads),
        (layer.key_norm_gamma, config.num_kv_heads),
    ):
        if gamma is not None and heads > 1:
            return bool(gamma.shape[0] != config.head_size)
    return None


class PackedCausalModel:
    """A decoder-only model's weights, packed once.

    Parameters
    ----------
    config : CausalConfig
        Of the model.
    weights : CausalWeights
        See there; not kept.
    weight_format : {"float32", "bfloat16", "int8", "int4"}, optional
        What linear weights and the embedding are held as; of "int4" the head and the embedding are
        int8. None: as they come, blocks of a GGUF file as they are; bfloat16 as bfloat16, other
        floats as float32.

    Attributes
    ----------
    memory, layout : Tensor
        uint8 [bytes] with all weights, and int64 [layers + 1, 27]: where they lie. See
        csrc/bindings/causal_checks.h.
    sizes, numbers : list
        The config as the ops take it.
    cache_windows : list of int
        Of the model's caches: 0 keeps all positions, another number so many.
    cache_layers : list of int
        How many layers each cache has.
    state_size : int
        Float32 numbers of a sequence's state, of all layers that have one.
    max_positions : int or None
        That the model has embeddings for.
    saved_hash : str or None
        The SHA-256 that weights were saved with, which are mapped as they are.

    Raises
    ------
    ValueError, TypeError
        Names what has a wrong shape, dtype or type.
    """

    saved_hash: str | None = None

    def __init__(
        self,
        config: CausalConfig,
        weights: CausalWeights,
        weight_format: str | torch.dtype | None = "float32",
    ) -> None:
        self.config, self.weight_format = config, _checked_format(weight_format)
        self._check(weights)
        is_tied = weights.logits is None
        embedding_format = (
            _IS_LOGITS if is_tied else _EMBEDDINGS.get(self.weight_format, _IS_PACKED)
        )
        self.max_positions = None if weights.positions is None else weights.positions.shape[0]
        self._set_numbers(embedding_format)
        self._set_caches()
        self._pack(weights, embedding_format)

    @classmethod
    def of_packed(
        cls, config: Mapping[str, Any], weight_format: str, facts: Mapping[str, Any]
    ) -> PackedCausalModel:
        """Return a model whose weights have been packed before, without them: see ``take``.

        Parameters
        ----------
        config, weight_format, facts
            Its ``config_fields()``, its format, and its ``facts()``.

        Raises
        ------
        KeyError, TypeError, ValueError
            Facts are missing, or of another type or shape. That they fit the memory is for the ops
            to see.
        """
        model = cls.__new__(cls)
        model.config = CausalConfig(**config)
        is_as_it_is = weight_format == AS_IT_IS
        model.weight_format = AS_IT_IS if is_as_it_is else _checked_format(weight_format)
        model.max_positions = facts["max_positions"]
        model._set_numbers(facts["embedding_format"])
        model.sizes[_NORMS_ALL_HEADS] = int(facts["norms_all_heads"])
        model._set_caches()
        for name, part in model._offsets().items():
            offsets = torch.tensor(facts[name], dtype=torch.int64)
            if offsets.dim() == 2 and offsets.shape[1] in _FORMER_PARTS:
                more = part.shape[1] - offsets.shape[1]
                offsets = torch.nn.functional.pad(offsets, (0, more), value=_NONE)
            if offsets.shape != part.shape:
                raise ValueError(
                    f"{name} has shape {list(offsets.shape)}; expected {list(part.shape)}"
                )
            part.copy_(offsets)
        return model

    def take(self, memory: Tensor) -> None:
        """Take the weights, packed for this process; that they fit is for the ops to see."""
        self.memory = memory

    def buffers(self) -> list[Tensor]:
        """Return the memory in parts, one behind the other."""
        return [self.memory]

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of the config."""
        return dataclasses.asdict(self.config)

    def facts(self) -> dict[str, Any]:
        """Return the metadata, beside config and format, that describes the memory's layout."""
        return {
            "embedding_format": self.sizes[_EMBEDDING_FORMAT],
            "max_positions": self.max_positions,
            "norms_all_heads": bool(self.sizes[_NORMS_ALL_HEADS]),
            **{name: part.tolist() for name, part in self._offsets().items()},
        }

    def _offsets(self) -> dict[str, Tensor]:
        """Return the layout without what the config tells: where parts of the memory begin."""
        return {
            "model_offsets": self.layout[0, :_NUM_MODEL_PARTS],
            "layer_offsets": self.layout[1:, 4:],
        }

    def packed_parts(self, memory: Tensor) -> list[tuple[int, int]]:
        """Return where each packed weight begins in the memory, and its bytes; first the head."""
        return [
            part
            for at, shape in self._packed_places()
            for part in parts_of_packed(memory, at, shape[0])
        ]

    def first_packed(self) -> int:
        """Return where the first packed weight, the head, begins in the memory."""
        return int(self.layout[0, _LOGITS])

    @property
    def packed_numel(self) -> int:
        """How many weights there are in what ``packed_parts`` returns."""
        return sum(math.prod(shape) for _, shape in self._packed_places())

    def _packed_places(self) -> list[tuple[int, tuple[int, int]]]:
        """Return where each packed weight begins in the memory, and its shape."""
        shapes = linear_shapes(self.config)
        places = [(int(self.layout[0, _LOGITS]), shapes["logits"])]
        if self.sizes[_EMBEDDING_FORMAT] == _IS_PACKED:
            places.append((int(self.layout[0, _EMBEDDING]), shapes["logits"]))
        for row, mixer in zip(self.layout[1:], self.config.mixers, strict=True):
            shapes = linear_shapes(self.config, mixer)
            for column, name in enumerate(CausalLayerWeights._fields, start=4):
                if name in shapes and int(row[column]) != _NONE:
                    places.append((int(row[column]), shapes[name]))
        return places

    def _check(self, weights: CausalWeights) -> None:
        c = self.config
        table = (c.vocab_size, c.model_size)
        _check("embedding", weights.embedding, table, optional=False)
        if weights.positions is not None:
            shape = (len(weights.positions), c.model_size)
            _check("positions", weights.positions, shape, optional=False)
        if len(weights.rotary) != len(c.rotary_scales):
            raise ValueError(
                f"Decoding: weights.rotary has {len(weights.rotary)} entries; expected "
                f"{len(c.rotary_scales)}, as rotary_scales has"
            )
        assert c.rotary_size is not None
        for i, frequencies in enumerate(weights.rotary):
            _check(f"rotary[{i}]", frequencies, (c.rotary_size // 2,), optional=False)
        for name in ("final_norm_gamma", "final_norm_beta"):
            _check(name, getattr(weights, name), (c.model_size,), optional=True)
        _check("logits", weights.logits, table, optional=True)
        _check("logits_bias", weights.logits_bias, (c.vocab_size,), optional=True)
        if len(weights.layers) != c.num_layers:
            raise ValueError(
                f"Decoding: weights.layers has {len(weights.layers)} entries; expected "
                f"num_layers, {c.num_layers}"
            )

    def _set_numbers(self, embedding_format: int) -> None:
        c = self.config
        assert c.rotary_size is not None and c.attention_scale is not None
        self.sizes = [
            c.num_layers,
            c.model_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_size,
            c.ffn_size,
            c.vocab_size,
            c.rotary_size,
            len(c.rotary_scales),
            self.max_positions or 0,
            0,  # norms_all_heads: the layers tell
            NORMS[c.norm],
            int(c.gated),
            ACTIVATIONS[c.activation],
            format_number(self.weight_format),
            embedding_format,
            int(c.attention_gate),
            *mixer_numbers(c.mixers),
        ]
        self.numbers = [
            c.norm_epsilon,
            c.attention_scale,
            c.attention_softcap,
            c.logits_softcap,
            c.embedding_scale,
            c.logits_scale,
            *c.rotary_scales,
        ]

    def _set_caches(self) -> None:
        """Put layers with a window into a cache that lets go of what is behind it.

        The layout says so, and has no parts yet.
        """
        windows = self.config.windows
        widest = max((window for window in windows if window is not None), default=0)
        self.cache_windows: list[int] = []
        self.cache_layers: list[int] = []
        self.layout = torch.full((len(windows) + 1, _NUM_COLUMNS), _NONE, dtype=torch.int64)
        self._set_states()
        for has_window in (False, True):
            layers = [
                i
                for i, (w, mixer) in enumerate(zip(windows, self.config.mixers, strict=True))
                if mixer is None and (w is not None) == has_window
            ]
            if not layers:
                continue
            for place, layer in enumerate(layers):
                numbers = [
                    windows[layer] or 0,
                    _NONE if (rotary := self.config.rotary[layer]) is None else rotary,
                    len(self.cache_windows),
                    place,
                ]
                self.layout[layer + 1, :4] = torch.tensor(numbers)
            self.cache_windows.append(widest if has_window else 0)
            self.cache_layers.append(len(layers))

    def _set_states(self) -> None:
        """Say of layers with a state where it begins in that of the model: see ``state_size``."""
        self.state_size = 0
        for layer, mixer in enumerate(self.config.mixers, start=1):
            if mixer is None:
                continue
            self.layout[layer, :4] = torch.tensor([0, _NONE, _NONE, self.state_size])
            self.state_size += -(-mixer.state_size // 16) * 16

    def _parts_of_model(
        self, weights: CausalWeights, embedding_format: int
    ) -> dict[str, LinearWeight | None]:
        is_read_from_logits = embedding_format == _IS_LOGITS
        rotary = torch.stack([r.float().cpu() for r in weights.rotary]) if weights.rotary else None
        return {
            "embedding": None if is_read_from_logits else weights.embedding,
            "positions": weights.positions,
            "rotary": rotary,
            "final_norm_gamma": weights.final_norm_gamma,
            "final_norm_beta": weights.final_norm_beta,
            "logits": weights.embedding if weights.logits is None else weights.logits,
            "logits_bias": weights.logits_bias,
        }

    def _most_bytes(self, weights: CausalWeights) -> int:
        """Return an upper bound in bytes: every optional weight in every layer."""
        c, sizes = self.config, self._packed_sizes()
        of_model = sizes.pop("logits")
        if not c.gated:
            del sizes["ffn_gate"]
        size = c.model_size
        qkv = max(linear_shapes(c, mixer)["qkv"][0] for mixer in set(c.mixers))
        layer = sum(sizes.values()) + _NUM_COLUMNS * _ALIGNMENT
        layer += 4 * (10 * size + 2 * qkv + 2 * c.ffn_size)
        layer += 4 * max(
            sum(map(math.prod, state_shapes(mixer).values())) for mixer in set(c.mixers)
        )
        positions = 0 if weights.positions is None else weights.positions.numel()
        rotary = sum(frequencies.numel() for frequencies in weights.rotary)
        table = c.vocab_size * size
        of_model += most_packed_bytes((c.vocab_size, size), format_of_head(self.weight_format))
        of_model += 4 * (table + positions + rotary + 2 * size + c.vocab_size)
        return of_model + c.num_layers * layer + _NUM_COLUMNS * _ALIGNMENT

    def _packed_sizes(self) -> dict[str, int]:
        """Return the bytes that each linear weight takes at most."""
        sizes: dict[str, int] = {}
        for mixer in set(self.config.mixers):
            for name, shape in linear_shapes(self.config, mixer).items():
                size = most_packed_bytes(shape, self.weight_format)
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    def _pack(self, weights: CausalWeights, embedding_format: int) -> None:
        c, layout = self.config, self.layout
        # Pages that nothing is written to are never had of the system.
        memory, used = new_memory(self._most_bytes(weights)), 0
        linear = linear_shapes(c)

        def put(row: int, column: int, name: str, value: LinearWeight) -> None:
            nonlocal used
            layout[row, column] = used
            if name in linear or (name == "embedding" and embedding_format == _IS_PACKED):
                is_table = name in ("embedding", "logits")
                kind = format_of_head(self.weight_format) if is_table else self.weight_format
                size = pack_weight_into(value, kind, memory[used:])
            else:
                value = value if isinstance(value, Tensor) else value.dequantize()
                value = value.T if name == "convolution" else value  # tap by tap
                is_half = name == "embedding" and embedding_format == _IS_BFLOAT16
                dtype = torch.bfloat16 if is_half else torch.float32
                size = value.numel() * dtype.itemsize
                memory[used : used + size].view(dtype).view(value.shape).copy_(value.detach())
            end = used + -(-size // _ALIGNMENT) * _ALIGNMENT
            memory[used + size : end] = 0  # the same weights give the same bytes
            used = end

        with torch.no_grad():
            of_model = self._parts_of_model(weights, embedding_format)
            for column, (name, value) in enumerate(of_model.items()):
                if value is not None:
                    put(0, column, name, value)
            del of_model
            norms_all_heads = None
            for i in range(c.num_layers):
                layer = weights.layers[i]
                _check_layer(c, f"layers[{i}]", layer, c.mixers[i])
                for_all = _norms_all_heads(c, layer)
                if None not in (norms_all_heads, for_all) and norms_all_heads != for_all:
                    raise ValueError(
                        f"Decoding: weights.layers[{i}] has norms of heads that are of "
                        f"{'all heads' if for_all else 'each head'}; expected those of the layers "
                        "before"
                    )
                norms_all_heads = for_all if norms_all_heads is None else norms_all_heads
                for column, (name, value) in enumerate(layer._asdict().items(), start=4):
                    if value is not None:
                        put(i + 1, column, name, value)
            self.sizes[_NORMS_ALL_HEADS] = int(bool(norms_all_heads))
        self.memory = memory[:used]
