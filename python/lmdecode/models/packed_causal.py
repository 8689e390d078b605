"""The weights of a decoder-only model as its ops take them: packed, in one memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode._memory import bytes_of
from lmdecode._ops import ops
from lmdecode.linear.formats import (
    AS_IT_IS,
    FORMATS,
    format_of_head,
    most_packed_bytes,
    numel_of_packed,
    pack_weight_into,
    parts_of_packed,
)
from lmdecode.linear.quantized_weight import JoinedWeight, LinearWeight
from lmdecode.models.checks import (
    check_layer,
    check_model,
    check_weight,
    expert_shapes,
    linear_shapes,
    model_shapes,
    norms_of_all_heads,
    state_shapes,
)
from lmdecode.models.configs import CausalConfig, Heads
from lmdecode.models.huge_memory import ALIGNMENT, SpareMemory, new_memory
from lmdecode.models.record import (
    as_float32,
    config_entries,
    config_of,
    own_bytes_of,
    places_of,
    read_record,
    record_bytes,
    record_text,
    write_record,
)
from lmdecode.models.weights import CausalLayerWeights, CausalWeights

__all__ = ["IS_BFLOAT16", "IS_FLOAT32", "IS_PACKED", "PackedCausalModel"]


TABLES = ("embedding", "per_layer_embedding")
PROJECTIONS = ("per_layer_projection", "embedding_projection", "hidden_projection")  # of the model
EXPERTS = ("experts_gate", "experts_up", "experts_down")
LINEAR = ("qkv", "attention_out", "ffn_up", "ffn_gate", "ffn_down", "router", "logits",
          "per_layer_gate", "per_layer_out", *PROJECTIONS)  # fmt: skip
# Formats of an embedding, as in csrc/decoder/per_layer_input.h.
IS_LOGITS, IS_FLOAT32, IS_BFLOAT16, IS_PACKED = 0, 1, 2, 3


def format_of(name: str, weight_format: str) -> str:
    """Return the format of a linear weight: experts are chosen by floats."""
    return "float32" if name == "router" else weight_format


class WeightMemory:
    """A memory, uint8 [bytes], that weights are written to; ``used`` bytes have been, or are not.

    Linear weights get ``weight_format``, each table of tokens its format of ``formats_of_tables``.
    """

    def __init__(
        self, memory: Tensor, used: int, weight_format: str, formats_of_tables: Mapping[str, int]
    ) -> None:
        self.memory, self.used = memory, used
        self._format, self._formats_of_tables = weight_format, formats_of_tables

    def write(
        self, path: str, name: str, value: Any, experts: Mapping[str, tuple[int, int]]
    ) -> tuple[int, int]:
        """Write a weight that fits the config; return where it begins, and its bytes.

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
        return begin, size

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


# Parts that a model shares with its ``mtp``; they are in the memory once.
_SHARED_PARTS = ("embedding", "positions", "rotary", "logits", "logits_bias")
_MOST_PARTS = len(CausalLayerWeights._fields)
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

    ``memory``, uint8 [bytes], begins with ``record`` (record.py), and holds all weights.
    ``cache_windows`` has the positions that each of the model's caches keeps (0: all),
    ``cache_layers`` and ``cache_heads`` their layers and heads, ``cache_places`` the cache of each
    layer with attention, and which of its layers that is, else None. ``state_size`` is the float32
    numbers of a sequence's state over all layers, ``max_positions`` the number of position
    embeddings or None. ``spare_memory`` is scratch memory of deleted caches.

    ``mtp`` predicts further tokens: a model of one layer, which reads rows of this model. Its
    memory is a part of this one: its record is behind the model's own, its weights are behind the
    ``own_bytes`` of the model. ``saved_hash`` is the SHA-256 of saved weights that are mapped
    unchanged, or None.
    """

    memory: Tensor
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
        self._begin(embedding_format)
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
        model.config, model.weight_format, model.mtp = config, self.weight_format, None
        check_model(config, weights)
        model._begin(self.record["embedding_format"])
        return model

    @classmethod
    def of_memory(cls, memory: Tensor, facts: Mapping[str, Any] | None = None) -> PackedCausalModel:
        """Return the model of another one's memory, which is kept as it is.

        ``facts`` are of other kinds of models. Raises AttributeError, KeyError, RuntimeError,
        TypeError or ValueError for another record. That parts fit the config is for the ops to see.
        """
        model = cls.__new__(cls)
        model.record = read_record(memory)
        model.config = config_of(CausalConfig, model.record)
        name = model.record["weight_format"]
        model.weight_format = name if name == AS_IT_IS else _checked_format(name)
        expected = model._set_caches()
        if (
            found := {
                name: value for name, value in model.record.items() if name.startswith("layers.")
            }.items()
            ^ expected.items()
        ):
            raise ValueError(f"{sorted(found)[0][0]} is not what the config says")
        model.memory, model.mtp = memory, None
        room = record_bytes(model.config.num_layers)
        if own_bytes_of(memory[room:]) is not None:
            model.mtp = cls.of_memory(memory[room:])
        return model

    def check(self) -> None:
        """Raise ValueError where the ops refuse the weights."""
        ops.causal_workspace_bytes(self.memory, [1, 1, 1])
        if self.mtp is not None:
            self.mtp.check()

    def facts(self) -> dict[str, Any]:
        """Return what describes the memory, beside its record."""
        return {}

    def buffers(self) -> list[Tensor]:
        """Return the memory in consecutive parts."""
        return [self.memory]

    @property
    def own_bytes(self) -> int:
        """The bytes of the memory without the weights of ``mtp`` alone."""
        return own_bytes_of(self.memory) or 0

    @property
    def max_positions(self) -> int | None:
        """The number of position embeddings; None: the model has none."""
        place = self.record.get("weights.positions")
        return None if place is None else place[1] // (4 * self.config.model_size)

    def weights_hash(self) -> str:
        """Return the SHA-256 of the record and of the weights, without those of ``mtp`` alone.

        Numbers count as the ops take them, in float32: files have them in different precisions.
        """
        numbers = {name: as_float32(value) for name, value in self.record.items()}
        digest = hashlib.sha256(record_text(numbers))
        digest.update(bytes_of(self.memory[self._begin_of_weights : self.own_bytes]))
        return digest.hexdigest()

    @property
    def _begin_of_weights(self) -> int:
        """Behind the model's record there is room for that of ``mtp``."""
        return record_bytes(self.config.num_layers) + record_bytes(1)

    def first_packed(self) -> int:
        """Return where a packed weight begins in the memory: the head."""
        return int(self.record["weights.logits"][0])

    def packed_parts(self) -> list[tuple[int, int]]:
        """Return where each packed weight begins in the memory, and its bytes."""
        parts = [
            part
            for name, at, size in places_of(self.record)
            if self._is_packed(name)
            for part in parts_of_packed(self.memory, at, size)
        ]
        if self.mtp is not None:
            begin = len(self.memory) - len(self.mtp.memory)
            parts += [(begin + at, size) for at, size in self.mtp.packed_parts()]
        return list(dict.fromkeys(parts))

    def _is_packed(self, name: str) -> bool:
        """Whether a part of the record is a packed weight."""
        if name in TABLES:
            return self._format_of_table(name) == IS_PACKED
        return name.split(".")[-1] in (*LINEAR, *EXPERTS)

    @property
    def packed_numel(self) -> int:
        """How many weights there are in what ``packed_parts`` returns."""
        return sum(numel_of_packed(self.memory, at) for at, _ in self.packed_parts())

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
            return int(self.record["embedding_format"])
        return _EMBEDDINGS.get(self.weight_format, IS_PACKED)

    def _begin(self, embedding_format: int) -> None:
        """Begin the record; its weights are added as they are packed."""
        self.record: dict[str, Any] = {
            "kind": "causal",
            "weight_format": self.weight_format,
            "embedding_format": embedding_format,
            **config_entries(self.config),
        }
        if self.config.per_layer_size:
            self.record["per_layer_format"] = self._format_of_table("per_layer_embedding")
        self.record |= self._set_caches()

    def _set_caches(self) -> dict[str, int]:
        """Assign layers with a window to a cache that drops positions out of the window.

        Each layer with a state gets its offset in the model's state. Returns the entries of layers
        in the record.
        """
        c, windows = self.config, self.config.windows
        widest = max((window for window in windows if window is not None), default=0)
        self.spare_memory = SpareMemory()
        self.cache_windows: list[int] = []
        self.cache_layers: list[int] = []
        self.cache_heads: list[Heads] = []
        self.cache_places: list[tuple[int, int] | None] = [None] * c.num_layers
        for has_window in (False, True):
            layers = [
                i
                for i, w in enumerate(windows)
                if c.has_attention(i) and (w is not None) == has_window and c.shared_keys[i] is None
            ]
            if not layers:
                continue
            for place, layer in enumerate(layers):
                self.cache_places[layer] = (len(self.cache_windows), place)
            self.cache_windows.append(widest if has_window else 0)
            self.cache_layers.append(len(layers))
            self.cache_heads.append(c.heads_of(has_window=has_window))
        for layer, shared in enumerate(c.shared_keys):
            if shared is not None:
                self.cache_places[layer] = self.cache_places[shared]
        entries = {}
        for layer, cache in enumerate(self.cache_places):
            if cache is not None:
                entries[f"layers.{layer}.cache"], entries[f"layers.{layer}.cache_layer"] = cache
        self.state_size = 0
        for layer, mixer in enumerate(c.mixers):
            if mixer is not None:
                entries[f"layers.{layer}.state"] = self.state_size
                self.state_size += -(-mixer.state_size // 16) * 16
        return entries

    def _parts_of_model(
        self, weights: CausalWeights, embedding_format: int
    ) -> dict[str, LinearWeight | None]:
        c, rotary = self.config, None
        assert c.rotary_size is not None and c.global_rotary_size is not None
        most = max(c.rotary_size, c.global_rotary_size) // 2
        if weights.rotary and most:  # as long as those that layers use
            padded = [F.pad(r.float().cpu(), (0, most - len(r))) for r in weights.rotary]
            rotary = torch.stack(padded)
        parts = weights._asdict()
        del parts["layers"], parts["mtp"]
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
        return self._begin_of_weights + of_model + layers + _MOST_PARTS * ALIGNMENT

    def _most_layer_bytes(self, layer: int) -> int:
        c = self.config
        total, floats = _MOST_PARTS * ALIGNMENT, 16 * c.model_size + c.num_heads
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
        begin, room = self._begin_of_weights, record_bytes(self.config.num_layers)
        # The system never hands out pages that nothing is written to.
        memory = WeightMemory(new_memory(size), begin, self.weight_format, formats)
        self._pack(self._parts_of_model(weights, embedding_format), weights.layers, memory)
        write_record(memory.memory, self.record, room, memory.used)
        memory.memory[room:begin] = 0
        if self.mtp is not None and weights.mtp is not None:
            of_mtp = self.mtp._parts_of_model(weights.mtp[1], embedding_format)
            for name in _SHARED_PARTS:
                of_mtp[name] = None
                if (shared := self.record.get(f"weights.{name}")) is not None:
                    self.mtp.record[f"weights.{name}"] = (shared[0] - room, shared[1])
            self.mtp._pack(of_mtp, weights.mtp[1].layers, memory, room)
            self.mtp.memory = memory.memory[room : memory.used]
            write_record(self.mtp.memory, self.mtp.record, begin - room, len(self.mtp.memory))
        self.memory = memory.memory[: memory.used]

    def _pack(
        self,
        of_model: dict[str, LinearWeight | None],
        layers: Sequence[CausalLayerWeights],
        memory: WeightMemory,
        begin: int = 0,
    ) -> None:
        """Append the weights to a memory, and their places, counted from a byte, to the record."""
        c, matrices = self.config, expert_shapes(self.config)

        def write(path: str, name: str, value: Any, experts: Mapping[str, Any]) -> None:
            at, size = memory.write(path, name, value, experts)
            where = path.replace("[", ".").replace("]", "")
            self.record[f"weights.{where}{name}"] = (at - begin, size)

        with torch.no_grad():
            for name in list(of_model):
                if (value := of_model.pop(name)) is not None:
                    write("", name, value, {})
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
                for name, value in layer._asdict().items():
                    if value is not None:
                        write(f"layers[{i}].", name, value, matrices)
            self.record["norms_all_heads"] = int(bool(norms_all_heads))
