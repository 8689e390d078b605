"""The weights of a decoder-only model as its ops take them: packed, in one memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode.decoder.causal_config import (
    CausalConfig,
    CausalLayerWeights,
    CausalWeights,
    Heads,
)
from lmdecode.decoder.causal_weight_checks import (
    check_layer,
    check_model,
    check_weight,
    expert_shapes,
    linear_shapes,
    model_shapes,
    norms_of_all_heads,
    state_shapes,
)
from lmdecode.decoder.config import ACTIVATIONS, FORMATS, NORMS, format_number
from lmdecode.decoder.experts import NO_NUMBERS, NO_SIZES
from lmdecode.decoder.huge_memory import SpareMemory, new_memory
from lmdecode.decoder.mixers import mixer_numbers, mixer_sizes
from lmdecode.linear.formats import (
    AS_IT_IS,
    format_of_head,
    most_packed_bytes,
    pack_weight_into,
    parts_of_packed,
)
from lmdecode.linear.quantized_weight import JoinedWeight, LinearWeight

__all__ = ["IS_BFLOAT16", "IS_FLOAT32", "IS_PACKED", "PackedCausalModel"]


ALIGNMENT = 64  # bytes
TABLES = ("embedding", "per_layer_embedding")
PROJECTIONS = ("per_layer_projection", "embedding_projection", "hidden_projection")  # of the model
LINEAR = ("qkv", "attention_out", "ffn_up", "ffn_gate", "ffn_down", "router", "logits",
          "per_layer_gate", "per_layer_out", *PROJECTIONS)  # fmt: skip
# Formats of an embedding, as in csrc/decoder/per_layer_input.h.
IS_LOGITS, IS_FLOAT32, IS_BFLOAT16, IS_PACKED = 0, 1, 2, 3


def format_of(name: str, weight_format: str) -> str:
    """Return the format of a linear weight: experts are chosen by floats."""
    return "float32" if name == "router" else weight_format


class WeightMemory:
    """A memory, uint8 [bytes], that weights are written to; ``used`` bytes have been.

    Linear weights get ``weight_format``, each table of tokens its format of ``formats_of_tables``.
    """

    def __init__(
        self, memory: Tensor, weight_format: str, formats_of_tables: Mapping[str, int]
    ) -> None:
        self.memory, self.used = memory, 0
        self._format, self._formats_of_tables = weight_format, formats_of_tables

    def write(
        self, path: str, name: str, value: Any, experts: Mapping[str, tuple[int, int]]
    ) -> int:
        """Write a weight that fits the config; return where it begins.

        ``path`` is the prefix of its name in errors. ``experts`` maps names of weights that are
        matrices of experts to the shape of one matrix; each matrix is checked here.
        """
        begin, at = self.used, self.memory[self.used :]
        if name in experts:
            size = self._write_experts(f"{path}{name}", value, experts[name], at)
        elif name in LINEAR or self._formats_of_tables.get(name) == IS_PACKED:
            is_table = name in (*TABLES, "logits")
            kind = format_of_head(self._format) if is_table else self._format
            size = pack_weight_into(value, format_of(name, kind), at)
        else:
            value = value if isinstance(value, Tensor) else value.dequantize()
            value = value.T if name == "convolution" else value  # tap by tap
            is_half = self._formats_of_tables.get(name) == IS_BFLOAT16
            dtype = torch.bfloat16 if is_half else torch.float32
            size = value.numel() * dtype.itemsize
            at[:size].view(dtype).view(value.shape).copy_(value.detach())
        end = -(-size // ALIGNMENT) * ALIGNMENT
        at[size:end] = 0  # the same weights give the same bytes
        self.used += end
        return begin

    def _write_experts(self, name: str, matrices: Any, shape: tuple[int, int], to: Tensor) -> int:
        """Write the matrices of experts, concatenated; return their bytes."""
        used, size = 0, None
        for i in range(len(matrices)):
            matrix = matrices[i]  # one at a time
            check_weight(f"{name}[{i}]", matrix, shape, optional=False)
            if isinstance(matrix, JoinedWeight):
                matrix = matrix.dequantize()
            added = pack_weight_into(matrix, self._format, to[used:])
            if size not in (None, added):
                raise ValueError(
                    f"Decoding: weights.{name}[{i}] takes {added} bytes; expected {size}, in the "
                    "format of those before"
                )
            used, size = used + added, added
        return used


_NONE = -1
# The columns of a layout's row: numbers, then the parts of a layer.
_NUM_NUMBERS = 6
_NUM_COLUMNS = _NUM_NUMBERS + len(CausalLayerWeights._fields)
_EMBEDDING_FORMAT, _NORMS_ALL_HEADS = 15, 10  # in sizes
_EMBEDDING, _LOGITS = 0, 5  # in the layout's row of the model
_MODEL_PARTS = ("embedding", "positions", "rotary", "final_norm_gamma", "final_norm_beta", "logits",
                "logits_bias", "per_layer_embedding", "per_layer_projection",
                "per_layer_norm_gamma", "embedding_norm_gamma", "hidden_norm_gamma",
                "embedding_projection", "hidden_projection")  # fmt: skip
_NUM_MODEL_PARTS = len(_MODEL_PARTS)
# Parts that a model shares with its ``mtp``; they are in the memory once.
_SHARED_PARTS = ("embedding", "positions", "rotary", "logits", "logits_bias")
# Where keys come from, as in csrc/decoder/causal_forward.h.
_OWN_KEYS, _KEYS_ARE_VALUES, _SHARED_KEYS = 0, 1, 2
_EMBEDDINGS = {"float32": IS_FLOAT32, "bfloat16": IS_BFLOAT16}  # others are packed


def _checked_format(weight_format: object) -> str:
    """Return the name of a format; None: each weight has that in which it came."""
    if weight_format is None:
        return AS_IT_IS
    return check_format("Decoding", weight_format, FORMATS)


class PackedCausalModel:
    """A decoder-only model's weights, packed once; ``weights`` are not kept.

    ``weight_format`` is the format of linear weights and the embedding (with "int4", the head and
    the embedding are int8). None keeps a GGUF file's blocks and bfloat16; other floats become
    float32. Raises ValueError or TypeError that names the weight with a wrong shape, dtype or type.

    ``memory``, uint8 [bytes], holds all weights at the places of ``layout``, int64 [layers + 1,
    columns]: see csrc/bindings/causal_checks.h. ``sizes`` and ``numbers`` are the config as the ops
    take it. ``cache_windows`` has the positions that each of the model's caches keeps (0: all),
    ``cache_layers`` and ``cache_heads`` their layers and heads. ``state_size`` is the float32
    numbers of a sequence's state over all layers, ``max_positions`` the number of position
    embeddings or None. ``spare_memory`` is scratch memory of deleted caches.

    ``mtp`` predicts further tokens: a model of one layer in the same memory, which reads rows of
    this model. ``own_bytes`` does not count the bytes of ``mtp`` alone. ``saved_hash`` is the
    SHA-256 of saved weights that are mapped unchanged, or None.
    """

    saved_hash: str | None = None

    def __init__(
        self,
        config: CausalConfig,
        weights: CausalWeights,
        weight_format: str | torch.dtype | None = "float32",
    ) -> None:
        self.config, self.weight_format = config, _checked_format(weight_format)
        check_model(self.config, weights)
        is_tied = weights.logits is None
        embedding_format = IS_LOGITS if is_tied else _EMBEDDINGS.get(self.weight_format, IS_PACKED)
        self.max_positions = None if weights.positions is None else weights.positions.shape[0]
        self._set_numbers(embedding_format)
        self._set_caches()
        self.mtp = None if weights.mtp is None else self._new_mtp(*weights.mtp)
        self._pack_all(weights, embedding_format)

    def _new_mtp(self, config: CausalConfig, weights: CausalWeights) -> PackedCausalModel:
        """Return the model that predicts further tokens, without its weights."""
        if (sizes := (config.vocab_size, config.model_size)) != (
            own := (self.config.vocab_size, self.config.model_size)
        ):
            raise ValueError(
                f"Decoding: weights.mtp has {sizes[0]} tokens and a model_size of {sizes[1]}; "
                f"expected {own[0]} and {own[1]}, those of the model"
            )
        if weights.hidden_projection is None:
            raise ValueError("Decoding: weights.mtp has no hidden_projection; expected it")
        model = type(self).__new__(type(self))
        model.config, model.weight_format = config, self.weight_format
        model.max_positions, model.mtp, model.own_bytes = self.max_positions, None, 0
        check_model(config, weights)
        model._set_numbers(self.sizes[_EMBEDDING_FORMAT])
        model._set_caches()
        return model

    @classmethod
    def of_packed(
        cls, config: Mapping[str, Any], weight_format: str, facts: Mapping[str, Any]
    ) -> PackedCausalModel:
        """Return a model of packed weights, which ``take`` adds later.

        The arguments are its ``config_fields()``, format and ``facts()``. Raises KeyError,
        TypeError or ValueError if facts are missing, or of another type or shape. The ops check
        that they fit the memory.
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
            offsets = torch.tensor(facts[name], dtype=torch.int64, device="cpu")
            if offsets.shape != part.shape:
                raise ValueError(
                    f"{name} has shape {list(offsets.shape)}; expected {list(part.shape)}"
                )
            part.copy_(offsets)
        model.mtp, model.own_bytes = None, -1
        if (of_mtp := facts.get("mtp")) is not None:
            model.mtp = cls.of_packed(of_mtp["config"], weight_format, of_mtp)
            model.own_bytes = int(facts["own_bytes"])
        return model

    def take(self, memory: Tensor) -> None:
        """Take the weights, packed for this process; that they fit is for the ops to see."""
        self.memory = memory
        if self.mtp is None:
            self.own_bytes = memory.numel()
        else:
            self.mtp.take(memory)

    def buffers(self) -> list[Tensor]:
        """Return the memory in consecutive parts."""
        return [self.memory]

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of the config."""
        return dataclasses.asdict(self.config)

    def facts(self) -> dict[str, Any]:
        """Return the metadata, beside config and format, that describes the memory's layout."""
        facts: dict[str, Any] = {
            "embedding_format": self.sizes[_EMBEDDING_FORMAT],
            "max_positions": self.max_positions,
            "norms_all_heads": bool(self.sizes[_NORMS_ALL_HEADS]),
            **{name: part.tolist() for name, part in self._offsets().items()},
        }
        if self.mtp is not None:
            facts["own_bytes"] = self.own_bytes
            facts["mtp"] = {"config": self.mtp.config_fields(), **self.mtp.facts()}
        return facts

    def _offsets(self) -> dict[str, Tensor]:
        """Return the offsets of the memory's parts: the layout without columns from the config."""
        return {
            "model_offsets": self.layout[0, :_NUM_MODEL_PARTS],
            "layer_offsets": self.layout[1:, _NUM_NUMBERS:],
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
        shapes = model_shapes(self.config)
        places = [(int(self.layout[0, _LOGITS]), shapes["logits"])]
        for column, name in enumerate(_MODEL_PARTS):
            is_packed = name in PROJECTIONS or (
                name in TABLES and self._format_of_table(name) == IS_PACKED
            )
            if is_packed and int(self.layout[0, column]) != _NONE:
                places.append((int(self.layout[0, column]), shapes[name]))
        for i, row in enumerate(self.layout[1:]):
            packed = self._layer_shapes(i)
            for column, name in enumerate(CausalLayerWeights._fields, start=_NUM_NUMBERS):
                if name in packed and int(row[column]) != _NONE:
                    count, (outputs, inputs) = packed[name]
                    places.append((int(row[column]), (count * outputs, inputs)))
        if self.mtp is not None:
            places += [place for place in self.mtp._packed_places() if place not in places]
        return places

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, tuple[int, int]]]:
        """Return how many matrices each packed weight of a layer has, and their shape."""
        c, has_experts = self.config, self.config.has_experts(layer)
        shapes = {name: (1, shape) for name, shape in linear_shapes(c, layer).items()}
        if has_experts:
            assert c.experts is not None
            count = c.experts.num_experts
            shapes["router"] = (1, (count, c.model_size))
            shapes |= {name: (count, shape) for name, shape in expert_shapes(c).items()}
        return shapes

    def _format_of_table(self, name: str) -> int:
        """Return how the rows of tokens are held."""
        if name == "embedding":
            return self.sizes[_EMBEDDING_FORMAT]
        return _EMBEDDINGS.get(self.weight_format, IS_PACKED)

    def _set_numbers(self, embedding_format: int) -> None:
        c = self.config
        assert c.rotary_size is not None and c.attention_scale is not None
        windowed, of_global = (c.heads_of(has_window=has) for has in (True, False))
        norm_first, of_mixer = mixer_numbers(c.mixers)
        self.sizes = [
            c.num_layers,
            c.model_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_size,
            c.ffn_size,
            c.vocab_size,
            windowed.rotary_size,
            len(c.rotary_scales),
            self.max_positions or 0,
            0,  # norms_all_heads: the layers tell
            NORMS[c.norm],
            int(c.gated),
            ACTIVATIONS[c.activation],
            format_number(self.weight_format),
            embedding_format,
            int(c.attention_gate),
            *mixer_sizes(c.mixers),
            *(NO_SIZES if c.experts is None else c.experts.sizes()),
            of_global.head_size,
            of_global.num_kv_heads,
            of_global.rotary_size,
            int(c.value_norm),
            c.per_layer_size,
            _EMBEDDINGS.get(self.weight_format, IS_PACKED),
            int(norm_first),
            int(c.attention_beside),
        ]
        self.numbers = [
            c.norm_epsilon,
            c.attention_scale,
            c.attention_softcap,
            c.logits_softcap,
            c.embedding_scale,
            c.logits_scale,
            *(NO_NUMBERS if c.experts is None else c.experts.numbers()),
            c.per_layer_scale,
            c.per_layer_epsilon,
            *of_mixer,
            *c.rotary_scales,
        ]

    def _set_caches(self) -> None:
        """Assign layers with a window to a cache that drops positions out of the window.

        The layout says so, and has no parts yet.
        """
        c, windows = self.config, self.config.windows
        widest = max((window for window in windows if window is not None), default=0)
        self.spare_memory = SpareMemory()
        self.cache_windows: list[int] = []
        self.cache_layers: list[int] = []
        self.cache_heads: list[Heads] = []
        self.layout = torch.full(
            (len(windows) + 1, _NUM_COLUMNS), _NONE, dtype=torch.int64, device="cpu"
        )
        self._set_states()
        for has_window in (False, True):
            layers = [
                i
                for i, w in enumerate(windows)
                if c.has_attention(i) and (w is not None) == has_window and c.shared_keys[i] is None
            ]
            if not layers:
                continue
            for place, layer in enumerate(layers):
                source = _KEYS_ARE_VALUES if c.keys_are_values[layer] else _OWN_KEYS
                self._set_attention(layer, len(self.cache_windows), place, source)
            self.cache_windows.append(widest if has_window else 0)
            self.cache_layers.append(len(layers))
            self.cache_heads.append(c.heads_of(has_window=has_window))
        for layer, shared in enumerate(c.shared_keys):
            if shared is not None:
                cache, place = self.layout[shared + 1, 2:4].tolist()
                self._set_attention(layer, cache, place, _SHARED_KEYS)

    def _set_attention(self, layer: int, cache: int, place: int, source: int) -> None:
        """Write the numbers of a layer with attention: see ``CausalLayer`` of the ops."""
        c, rotary = self.config, self.config.rotary[layer]
        window, turn = c.windows[layer] or 0, _NONE if rotary is None else rotary
        numbers = [window, turn, cache, place, source, c.ffn_sizes[layer]]
        self.layout[layer + 1, :_NUM_NUMBERS] = torch.tensor(numbers, device="cpu")

    def _set_states(self) -> None:
        """Assign each layer with a state its offset in the model's state: see ``state_size``."""
        self.state_size = 0
        for layer, mixer in enumerate(self.config.mixers, start=1):
            if mixer is None:
                continue
            ffn_size = self.config.ffn_sizes[layer - 1]
            numbers = [0, _NONE, _NONE, self.state_size, _OWN_KEYS, ffn_size]
            self.layout[layer, :_NUM_NUMBERS] = torch.tensor(numbers, device="cpu")
            self.state_size += -(-mixer.state_size // 16) * 16

    def _parts_of_model(
        self, weights: CausalWeights, embedding_format: int
    ) -> dict[str, LinearWeight | None]:
        rotary, most = None, max(map(len, weights.rotary), default=0)
        if weights.rotary:
            padded = [F.pad(r.float().cpu(), (0, most - len(r))) for r in weights.rotary]
            rotary = torch.stack(padded)
        parts = {name: getattr(weights, name) for name in _MODEL_PARTS}
        if weights.logits is None:
            parts["logits"] = weights.embedding
        if embedding_format == IS_LOGITS:
            parts["embedding"] = None
        return {**parts, "rotary": rotary}

    def _most_bytes(self, weights: CausalWeights) -> int:
        """Return an upper bound in bytes: every optional weight in every layer."""
        c = self.config
        size = c.model_size
        layers = sum(self._most_layer_bytes(i) for i in range(c.num_layers))
        positions = 0 if weights.positions is None else weights.positions.numel()
        rotary = len(weights.rotary) * max(map(len, weights.rotary), default=0)
        of_model = 4 * (positions + rotary + 4 * size + c.vocab_size + c.per_layer_size)
        for name, shape in model_shapes(c).items():
            is_linear = name in PROJECTIONS
            kind = self.weight_format if is_linear else format_of_head(self.weight_format)
            most = max(most_packed_bytes(shape, kind), most_packed_bytes(shape, self.weight_format))
            of_model += most if is_linear else most + 4 * math.prod(shape)
        return of_model + layers + _NUM_COLUMNS * ALIGNMENT

    def _most_layer_bytes(self, layer: int) -> int:
        c = self.config
        total, floats = _NUM_COLUMNS * ALIGNMENT, 16 * c.model_size + c.num_heads
        for name, (count, shape) in self._layer_shapes(layer).items():
            if 0 in shape or (name == "ffn_gate" and not c.gated):
                continue
            kind = format_of(name, self.weight_format)
            total += count * most_packed_bytes(shape, kind)
            floats += 2 * count * shape[0]
        floats += sum(map(math.prod, state_shapes(c.mixers[layer]).values()))
        return total + 4 * floats

    def _pack_all(self, weights: CausalWeights, embedding_format: int) -> None:
        """Pack the weights, then the weights that ``mtp`` alone has."""
        size = self._most_bytes(weights)
        if self.mtp is not None and weights.mtp is not None:
            size += self.mtp._most_bytes(weights.mtp[1])
        formats = {name: self._format_of_table(name) for name in TABLES}
        # The system never hands out pages that nothing is written to.
        memory = WeightMemory(new_memory(size), self.weight_format, formats)
        self._pack(self._parts_of_model(weights, embedding_format), weights.layers, memory)
        self.own_bytes = memory.used
        if self.mtp is not None and weights.mtp is not None:
            of_mtp = self.mtp._parts_of_model(weights.mtp[1], embedding_format)
            for name in _SHARED_PARTS:
                column = _MODEL_PARTS.index(name)
                self.mtp.layout[0, column] = self.layout[0, column]
                of_mtp[name] = None
            self.mtp._pack(of_mtp, weights.mtp[1].layers, memory)
            self.mtp.memory = memory.memory[: memory.used]
        self.memory = memory.memory[: memory.used]

    def _pack(
        self,
        of_model: dict[str, LinearWeight | None],
        layers: Sequence[CausalLayerWeights],
        memory: WeightMemory,
    ) -> None:
        """Append the weights to a memory."""
        c, layout, matrices = self.config, self.layout, expert_shapes(self.config)
        with torch.no_grad():
            for column, name in enumerate(_MODEL_PARTS):
                if (value := of_model.pop(name)) is not None:
                    layout[0, column] = memory.write("", name, value, {})
                del value
            norms_all_heads = None
            for i in range(c.num_layers):
                layer = layers[i]
                check_layer(c, f"layers[{i}]", layer, i)
                for_all = norms_of_all_heads(c.heads(i), layer)
                if None not in (norms_all_heads, for_all) and norms_all_heads != for_all:
                    raise ValueError(
                        f"Decoding: weights.layers[{i}] has norms of heads that are of "
                        f"{'all heads' if for_all else 'each head'}; expected those of the layers "
                        "before"
                    )
                norms_all_heads = for_all if norms_all_heads is None else norms_all_heads
                for column, (name, value) in enumerate(layer._asdict().items(), start=_NUM_NUMBERS):
                    if value is not None:
                        layout[i + 1, column] = memory.write(f"layers[{i}].", name, value, matrices)
            self.sizes[_NORMS_ALL_HEADS] = int(bool(norms_all_heads))
