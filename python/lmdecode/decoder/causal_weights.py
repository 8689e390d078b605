"""The weights of a decoder-only model as its ops take them: packed, in one memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lmdecode._checks import check_format
from lmdecode._ops import ops
from lmdecode.decoder.causal_config import CausalConfig, CausalLayerWeights, CausalWeights
from lmdecode.decoder.config import ACTIVATIONS, FORMATS, NORMS
from lmdecode.decoder.huge_memory import new_memory

__all__ = ["PackedCausalModel"]

_ALIGNMENT = 64  # bytes
_NONE = -1
# Parts of a layer that are packed; behind the four numbers, the columns of a layout's row.
_PACKED = frozenset(("qkv", "attention_out", "ffn_up", "ffn_gate", "ffn_down", "logits"))
_NUM_COLUMNS = 4 + len(CausalLayerWeights._fields)
# Formats of an embedding, as in csrc/decoder/causal_forward.h.
_IS_LOGITS, _IS_FLOAT32, _IS_BFLOAT16 = 0, 1, 2


def _shape_error(name: str, tensor: Tensor, expected: Iterable[int]) -> ValueError:
    return ValueError(
        f"Decoding: weights.{name} has shape {list(tensor.shape)}; expected {list(expected)}"
    )


def _check(name: str, tensor: Tensor | None, *shapes: tuple[int, ...], optional: bool) -> None:
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


def _check_layer(config: CausalConfig, name: str, layer: CausalLayerWeights) -> None:
    c = config
    size, queries, keys, ffn = c.model_size, c.query_size, c.key_size, c.ffn_size
    qkv = queries + 2 * keys
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "qkv": ((qkv, size),),
        "qkv_bias": ((qkv,),),
        "query_norm_gamma": ((c.head_size,), (queries,)),
        "key_norm_gamma": ((c.head_size,), (keys,)),
        "attention_out": ((size, queries),),
        "ffn_up": ((ffn, size),),
        "ffn_up_bias": ((ffn,),),
        "ffn_gate": ((ffn, size),),
        "ffn_gate_bias": ((ffn,),),
        "ffn_down": ((size, ffn),),
    }
    for field, tensor in layer._asdict().items():
        optional = field not in _PACKED or (field == "ffn_gate" and not c.gated)
        _check(f"{name}.{field}", tensor, *shapes.get(field, ((size,),)), optional=optional)
    if not c.gated and layer.ffn_gate is not None:
        raise ValueError(
            f"Decoding: weights.{name}.ffn_gate was given; expected none, as not gated"
        )


def _norms_all_heads(config: CausalConfig, layers: Iterable[CausalLayerWeights]) -> bool:
    """Whether norms of queries and keys are of all heads as one row: the same in each layer."""
    found = set()
    for layer in layers:
        for gamma, heads in (
            (layer.query_norm_gamma, config.num_heads),
            (layer.key_norm_gamma, config.num_kv_heads),
        ):
            if gamma is not None and heads > 1:
                found.add(gamma.shape[0] != config.head_size)
    if len(found) > 1:
        raise ValueError("Decoding: some norms of heads are of each head, and some of all heads")
    return found == {True}


class PackedCausalModel:
    """A decoder-only model's weights, packed once.

    Parameters
    ----------
    config : CausalConfig
        Of the model.
    weights : CausalWeights
        See there; not kept.
    weight_format : {"float32", "bfloat16", "int8"}
        What linear weights are held as.

    Attributes
    ----------
    memory, layout : Tensor
        uint8 [bytes] with all weights, and int64 [layers + 1, 22]: where they lie. See
        csrc/bindings/causal_checks.h.
    sizes, numbers : list
        The config as the ops take it.
    cache_windows : list of int
        Of the model's caches: 0 keeps all positions, another number so many.
    cache_layers : list of int
        How many layers each cache has.
    max_positions : int or None
        That the model has embeddings for.

    Raises
    ------
    ValueError, TypeError
        Names what has a wrong shape, dtype or type.
    """

    def __init__(
        self,
        config: CausalConfig,
        weights: CausalWeights,
        weight_format: str | torch.dtype = "float32",
    ) -> None:
        weight_format = check_format("Decoding", weight_format, FORMATS)
        self.config, self.weight_format = config, weight_format
        self._check(weights)
        is_tied = weights.logits is None
        if is_tied and weight_format in ("float32", "bfloat16"):
            embedding_format = _IS_LOGITS
        else:
            embedding_format = _IS_FLOAT32 if weight_format == "float32" else _IS_BFLOAT16
        self.max_positions = None if weights.positions is None else weights.positions.shape[0]
        self._set_numbers(
            embedding_format, _norms_all_heads(config, weights.layers), len(weights.rotary)
        )
        self._set_caches()
        self._pack(weights, embedding_format)

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
        for i, layer in enumerate(weights.layers):
            _check_layer(c, f"layers[{i}]", layer)

    def _set_numbers(self, embedding_format: int, norms_all_heads: bool, num_rotary: int) -> None:
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
            num_rotary,
            self.max_positions or 0,
            int(norms_all_heads),
            NORMS[c.norm],
            int(c.gated),
            ACTIVATIONS[c.activation],
            FORMATS[self.weight_format],
            embedding_format,
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
        """Put layers with a window into a cache that lets go of what is behind it."""
        windows = self.config.windows
        widest = max((window for window in windows if window is not None), default=0)
        self.cache_windows: list[int] = []
        self.cache_layers: list[int] = []
        self._cache_of_layer: list[tuple[int, int]] = [(0, 0)] * len(windows)
        for has_window in (False, True):
            layers = [i for i, w in enumerate(windows) if (w is not None) == has_window]
            if not layers:
                continue
            for place, layer in enumerate(layers):
                self._cache_of_layer[layer] = (len(self.cache_windows), place)
            self.cache_windows.append(widest if has_window else 0)
            self.cache_layers.append(len(layers))

    def _parts(
        self, weights: CausalWeights, embedding_format: int
    ) -> Iterator[tuple[int, int, str, Tensor | None]]:
        """Yield row, column, name and value of each part of the layout."""
        embedding: Tensor | None = weights.embedding
        if embedding_format == _IS_LOGITS:
            embedding = None
        logits = weights.embedding if weights.logits is None else weights.logits
        rotary = torch.stack([r.float().cpu() for r in weights.rotary]) if weights.rotary else None
        of_model = (
            ("embedding", embedding),
            ("positions", weights.positions),
            ("rotary", rotary),
            ("final_norm_gamma", weights.final_norm_gamma),
            ("final_norm_beta", weights.final_norm_beta),
            ("logits", logits),
            ("logits_bias", weights.logits_bias),
        )
        for column, (name, value) in enumerate(of_model):
            yield 0, column, name, value
        for row, layer in enumerate(weights.layers, start=1):
            for column, (name, value) in enumerate(layer._asdict().items(), start=4):
                yield row, column, name, value

    def _bytes(self, name: str, value: Tensor, embedding_format: int) -> int:
        if name in _PACKED:
            like = torch.empty(value.shape, device="meta")
            return ops.pack_linear(like, FORMATS[self.weight_format]).numel()
        is_half = name == "embedding" and embedding_format == _IS_BFLOAT16
        return value.numel() * (2 if is_half else 4)

    def _pack(self, weights: CausalWeights, embedding_format: int) -> None:
        c = self.config
        layout = torch.full((c.num_layers + 1, _NUM_COLUMNS), _NONE, dtype=torch.int64)
        for i in range(c.num_layers):
            window, rotary = c.windows[i], c.rotary[i]
            cache, place = self._cache_of_layer[i]
            layout[i + 1, :4] = torch.tensor(
                [window or 0, _NONE if rotary is None else rotary, cache, place]
            )
        size, places = 0, {}
        for row, column, name, value in self._parts(weights, embedding_format):
            if value is None:
                continue
            bytes_ = self._bytes(name, value, embedding_format)
            places[row, column] = (size, bytes_)
            layout[row, column] = size
            size += -(-bytes_ // _ALIGNMENT) * _ALIGNMENT
        memory = new_memory(size)
        with torch.no_grad():
            for row, column, name, value in self._parts(weights, embedding_format):
                if value is None:
                    continue
                at, bytes_ = places[row, column]
                # The same weights give the same bytes.
                memory[at + bytes_ : at + -(-bytes_ // _ALIGNMENT) * _ALIGNMENT] = 0
                to = memory[at : at + bytes_]
                value = value.detach()
                if name in _PACKED:
                    to.copy_(ops.pack_linear(value.float(), FORMATS[self.weight_format]))
                else:
                    is_half = name == "embedding" and embedding_format == _IS_BFLOAT16
                    dtype = torch.bfloat16 if is_half else torch.float32
                    to.view(dtype).view(value.shape).copy_(value)
        self.memory, self.layout = memory, layout
