"""Decoder weights as the ops take them: linear ones packed, the others float32, in one memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode._ops import ops
from lmdecode.linear.formats import FORMATS, format_of_head, pack_weight
from lmdecode.models.checks import check_fields, check_stack_layer, check_weights
from lmdecode.models.configs import DecoderConfig, EncoderConfig
from lmdecode.models.huge_memory import SpareMemory, gather, new_memory
from lmdecode.models.record import (
    config_entries,
    config_of,
    places_of,
    read_record,
    record_bytes,
    write_record,
)
from lmdecode.models.weights import (
    LINEAR_FIELDS,
    DecoderWeights,
    EncoderLayerWeights,
    EncoderWeights,
    LayerWeights,
    float32,
)

__all__ = ["PackedDecoder", "PackedEncoder", "PackedStack", "packed_layer"]


def _packed_fields(weights: Any, weight_format: str) -> dict[str, Tensor]:
    """Return the tensors that weights have, but for layers and embedding, packed or float32."""
    packed = {}
    for name, tensor in weights._asdict().items():
        if tensor is None or name in ("embedding", "layers"):
            continue
        is_head = name == "logits"
        kind = format_of_head(weight_format) if is_head else weight_format
        is_linear = name in LINEAR_FIELDS
        packed[name] = pack_weight(tensor, kind) if is_linear else float32(tensor)
    return packed


def _pack_layer(config: Any, layer: Any, weight_format: str) -> dict[str, Tensor]:
    """Return the tensors of a layer of a decoder or an encoder, which are checked, by name.

    Layers have all of their norms: a gamma of None is 1.
    """
    check_stack_layer(config, layer)
    one = torch.ones(config.model_size, dtype=torch.float32, device="cpu")
    missing = {f: one for f in layer._fields if f.endswith("_gamma") and getattr(layer, f) is None}
    return _packed_fields(layer._replace(**missing), weight_format)


class PackedStack:
    """The layers of a decoder or an encoder, with the weights around them, packed once.

    ``embedding`` is float32, and not copied if it came so; it is empty if there is none. All other
    weights are in ``memory``, uint8 [bytes], behind its record (record.py). ``parts`` are views of
    it: uint8 if packed, else float32. The ops take ``of_model``, or ``memory`` alone if they read
    no tokens.
    """

    config: Any
    weight_format: str
    kind: ClassVar[str] = "decoder"
    config_type: ClassVar[type] = DecoderConfig
    layer_type: ClassVar[Any] = LayerWeights

    @classmethod
    def of_memory(cls, embedding: Tensor, memory: Tensor) -> Self:
        """Return a stack of the embedding and memory of another one, which are kept as they are.

        Raises AttributeError, KeyError, TypeError or ValueError for another record. That parts fit
        the config is for the ops to see.
        """
        stack, record = cls.__new__(cls), read_record(memory)
        config: Any = config_of(cls.config_type, record)
        check_format("Decoding", record["weight_format"], FORMATS)
        if embedding.numel():
            check_fields(config, {"embedding": embedding})
        stack._take(config, record, embedding, memory)
        return stack

    def _pack(self, config: Any, weights: Any, weight_format: str) -> None:
        """Pack weights of any kind; their layers are checked here."""
        parts = _packed_fields(weights, weight_format)
        self._gather(config, weight_format, float32(weights.embedding), parts, weights.layers)

    def _gather(
        self,
        config: Any,
        weight_format: str,
        embedding: Tensor,
        parts: dict[str, Tensor],
        layers: Iterable[Any],
    ) -> None:
        """Add packed layers to packed tensors, and move all to one memory, with its record."""
        for i, layer in enumerate(layers):
            packed = _pack_layer(config, layer, weight_format)
            parts |= {f"layers.{i}.{name}": tensor for name, tensor in packed.items()}
        bias = parts.get("relative_bias")
        record = {
            "kind": self.kind,
            "weight_format": weight_format,
            "relative_bias_rows": 0 if bias is None else len(bias),
            **config_entries(config),
        }
        names, tensors = list(parts), list(parts.values())
        parts.clear()  # each is let go when it has been moved
        room = record_bytes(config.num_layers)
        memory = gather(tensors, room)
        for name, tensor in zip(names, tensors, strict=True):
            place = (tensor.data_ptr() - memory.data_ptr(), tensor.nbytes)
            record[f"weights.{name}"] = place
        write_record(memory, record, room, len(memory))
        self._take(config, record, embedding, memory)

    def _take(
        self, config: Any, record: Mapping[str, Any], embedding: Tensor, memory: Tensor
    ) -> None:
        self.config, self.weight_format = config, record["weight_format"]
        self.embedding, self.memory, self._record = embedding, memory, record
        self.of_model = (embedding, memory)

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        """Views of the parts in the memory, by their names in the record."""
        tables = {
            "positions": (-1, self.config.model_size),
            "relative_bias": (self._record["relative_bias_rows"], -1),
        }
        parts: dict[str, Tensor] = {}
        for name, at, size in places_of(self._record):
            part = self.memory[at : at + size]
            if name.split(".")[-1] not in LINEAR_FIELDS:
                part = part.view(torch.float32)
            parts[name] = part.view(tables.get(name, (-1,)))
        return parts

    def layer(self, number: int) -> Any:
        """Return the packed weights of a layer."""
        prefix = f"layers.{number}."
        return self.layer_type._make(self.parts.get(prefix + f) for f in self.layer_type._fields)

    @property
    def num_distances(self) -> int | None:
        """The distances of the relative bias; None: there is none."""
        bias = self.parts.get("relative_bias")
        return None if bias is None else bias.shape[1]

    @property
    def num_positions(self) -> int | None:
        """The positions that have an embedding; None: there are no such embeddings."""
        positions = self.parts.get("positions")
        return None if positions is None else len(positions) - int(self.config.position_offset)

    def packed_parts(self) -> list[tuple[int, int]]:
        """Return where each packed weight begins in the memory, and its bytes."""
        return [
            (at, size)
            for name, at, size in places_of(self._record)
            if name.split(".")[-1] in LINEAR_FIELDS
        ]

    def __getstate__(self) -> dict[str, Any]:
        # What is a part of another tensor's memory would be written with the whole of it.
        def own(tensor: Tensor) -> Tensor:
            is_own = tensor.untyped_storage().nbytes() == tensor.nbytes
            return tensor if is_own else tensor.clone()

        return {"embedding": own(self.embedding), "memory": own(self.memory)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        memory = new_memory(len(state["memory"])).copy_(state["memory"])
        vars(self).update(vars(self.of_memory(state["embedding"], memory)))


class PackedDecoder(PackedStack):
    """A decoder's weights, packed once.

    ``weights`` are not kept, except for embeddings that are float32 already. ``spare_memory`` holds
    caches and scratch of searches. ``translators`` is the cache of ``Decoding.translate``, by its
    settings. Raises ValueError or TypeError that names the weight with a wrong shape, dtype or
    type.
    """

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        weight_format: str | torch.dtype = "float32",
    ) -> None:
        weight_format = check_format("Decoding", weight_format, FORMATS)
        check_weights(config, weights)
        self._pack(config, weights, weight_format)

    def check(self) -> None:
        """Raise ValueError where the ops refuse the weights, or without head or embedding."""
        ops.decoding_workspace_bytes(self.memory, [0, 1, 0, 1, 1, 0])
        if "logits" not in self.parts or not self.embedding.numel():
            raise ValueError("Decoding: a decoder has no logits or no embedding; expected both")

    def _take(self, config: DecoderConfig, *packed: Any) -> None:
        super()._take(config, *packed)
        self.device = torch.device("cpu")
        self.spare_memory = SpareMemory()
        self.translators: dict[bytes, Any] = {}


def packed_layer(config: Any, layer: Any, weight_format: str) -> PackedStack:
    """Return a checked layer of a decoder, the only one of its config."""
    stack = PackedStack()
    stack._gather(config, weight_format, float32(None), {}, [layer])
    return stack


class PackedEncoder(PackedStack):
    """An encoder's weights, packed once.

    ``weights`` are not kept, except for an embedding that is float32 already. Raises ValueError or
    TypeError that names the weight with a wrong shape, dtype or type.
    """

    config: EncoderConfig
    kind = "encoder"
    config_type = EncoderConfig
    layer_type = EncoderLayerWeights

    def __init__(
        self,
        config: EncoderConfig,
        weights: EncoderWeights,
        weight_format: str | torch.dtype = "float32",
    ) -> None:
        self._pack(config, weights, check_format("Decoding", weight_format, FORMATS))

    @property
    def longest(self) -> int | None:
        """The most rows of a sequence; None if neither positions nor distances limit it."""
        if self.num_positions is not None or self.num_distances is None:
            return self.num_positions
        return self.num_distances // 2 + 1

    def forward(
        self,
        row_begins: Tensor,
        positions: Tensor,
        *,
        tokens: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the encoder's output, [rows, model_size] float32.

        ``row_begins``, [sequences + 1] int64, is the first row of each sequence, then the number of
        rows. ``positions``, [rows] int64, index the position embeddings, if the model has them.
        Exactly one of ``tokens``, [rows] int64, and ``inputs``, [rows, model_size] float32, is
        given.
        """
        out: Tensor = ops.encoder_forward(*self.of_model, tokens, inputs, positions, row_begins)
        return out

    def check(self) -> None:
        """Raise ValueError where the op refuses the weights."""
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        begins = torch.zeros(1, dtype=torch.int64, device="cpu")
        if self.config.vocab_size:
            self.forward(begins, nothing, tokens=nothing)
        else:
            rows = torch.empty(0, self.config.model_size, dtype=torch.float32, device="cpu")
            self.forward(begins, nothing, inputs=rows)
