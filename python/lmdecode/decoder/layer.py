"""One layer of a decoder, one step at a time, and the sequences that its tokens spell."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmdecode._checks import (
    check_dense_tensors,
    check_format,
    check_int,
    check_no_gradient,
    type_error,
)
from lmdecode._ops import ops
from lmdecode.decoder.checks import indices
from lmdecode.decoder.state import DecodingCaches, new_caches
from lmdecode.linear.formats import FORMATS
from lmdecode.models.checks import check_floats
from lmdecode.models.configs import DecoderConfig
from lmdecode.models.packed_stack import packed_layer
from lmdecode.models.weights import LayerWeights, float32

__all__ = ["DecoderLayer", "gather_tree"]


class DecoderLayer:
    """One layer of a decoder, one step at a time.

    Parameters
    ----------
    config : DecoderConfig
        Of the decoder; its number of layers and its vocabulary do not matter.
    weights : LayerWeights
        Packed here, once.
    relative_bias : Tensor, optional
        [heads, distances], see ``DecoderWeights``.
    dtype : {"float32", "bfloat16", "int8", "int4"}
        As for ``Decoding``.

    Raises
    ------
    ValueError, TypeError
        A weight of a wrong shape, dtype or type, or another ``dtype``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: LayerWeights,
        relative_bias: Tensor | None = None,
        *,
        dtype: str | torch.dtype = "float32",
    ) -> None:
        op = "DecoderLayer"
        if not isinstance(config, DecoderConfig):
            raise type_error(op, "config", config, "a DecoderConfig")
        weight_format = check_format(op, dtype, FORMATS)
        if relative_bias is not None:
            check_floats(op, "relative_bias", relative_bias)
            shape, heads = relative_bias.shape, config.num_heads
            if len(shape) != 2 or shape[0] != heads or shape[1] < 1:
                raise ValueError(
                    f"{op}: relative_bias has shape {list(shape)}; expected [{heads}, any]"
                )
        self.config = replace(config, num_layers=1)
        self.relative_bias = float32(relative_bias)
        self._packed = packed_layer(self.config, weights, weight_format)

    def new_caches(
        self, memory: Tensor, memory_lengths: Tensor, rows: int, capacity: int
    ) -> DecodingCaches:
        """Return caches with the keys and values of the memories.

        Parameters
        ----------
        memory, memory_lengths : Tensor
            [requests, S, M] floats and [requests] int64: what the encoder gives, and how much of it
            counts.
        rows, capacity : int
            Sequences, or beams of requests, and positions of each.

        Returns
        -------
        DecodingCaches
            Every row of their ``table`` refers to itself.

        Raises
        ------
        ValueError, TypeError
            Names what has a wrong type, shape or dtype, or is out of range.
        """
        op, config = "DecoderLayer.new_caches", self.config
        check_floats(op, "memory", memory)
        check_dense_tensors(op, memory_lengths=memory_lengths)
        if memory.dim() != 3 or memory.shape[2] != config.memory_size:
            raise ValueError(
                f"{op}: memory has shape {list(memory.shape)}; "
                f"expected [requests, source, {config.memory_size}]"
            )
        limits = "0 to 2^31 - 1"
        rows = check_int(op, "rows", rows, 0, (1 << 31) - 1, limits=limits)
        capacity = check_int(op, "capacity", capacity, 0, (1 << 31) - 1, limits=limits)
        caches = new_caches(config, len(memory), rows, capacity, memory.shape[1])
        caches.table[:] = torch.arange(rows, dtype=torch.int32, device="cpu")[:, None]
        ops.decoding_read_memory_(
            self._packed.memory,
            list(caches),
            float32(memory),
            memory_lengths,
            torch.arange(len(memory), device="cpu"),
        )
        return caches

    def __call__(
        self,
        from_tensor: Tensor,
        caches: DecodingCaches,
        positions: Tensor,
        *,
        requests: Tensor | None = None,
        cache_rows: Tensor | None = None,
    ) -> Tensor:
        """Run the layer for one step of each row.

        Parameters
        ----------
        from_tensor : Tensor
            [R, D] float32.
        caches : DecodingCaches
            Of ``new_caches``; the rows' keys and values are written, in place.
        positions : Tensor
            [R] integers: where each row's sequence is; earlier positions have been run.
        requests : Tensor, optional
            [R] integers: the request with each row's memory; by default the rows are spread evenly.
        cache_rows : Tensor, optional
            [R] integers, all different: the row of the caches that each is; their order by default.

        Returns
        -------
        Tensor
            [R, D] float32.

        Raises
        ------
        ValueError, TypeError
            Names what has a wrong type, shape or dtype, requires a gradient, or is out of range;
            nothing has been written then.
        """
        op = "DecoderLayer"
        check_dense_tensors(op, from_tensor=from_tensor)
        check_no_gradient(op, from_tensor=from_tensor)
        if not isinstance(caches, DecodingCaches):
            raise type_error(op, "caches", caches, "DecodingCaches")
        if from_tensor.dim() != 2:
            shape = list(from_tensor.shape)
            raise ValueError(
                f"{op}: from_tensor has shape {shape}; expected [rows, {self.config.model_size}]"
            )
        rows, count = from_tensor.shape[0], caches.memory_lengths.shape[0]
        own = torch.arange(rows, dtype=torch.int32, device="cpu")
        if requests is None:
            if count == 0 or rows % count:
                raise ValueError(
                    f"{op}: from_tensor has {rows} rows for {count} memories; expected as "
                    "many for each, or requests"
                )
            requests = own // (rows // count)

        return ops.decoder_layer(
            from_tensor.contiguous(),
            self._packed.memory,
            self.relative_bias,
            list(caches),
            own if cache_rows is None else indices(op, "cache_rows", cache_rows, rows),
            indices(op, "positions", positions, rows),
            indices(op, "requests", requests, rows),
        )


def gather_tree(
    step_ids: Tensor, parent_ids: Tensor, max_sequence_lengths: Tensor, end_token: int
) -> Tensor:
    """Return the sequences that tokens and parents of each step spell, as TensorFlow's op does.

    Parameters
    ----------
    step_ids, parent_ids : Tensor
        [T, B, W] int32 or int64: the token of each beam in each step, and the beam of the same
        request, 0 to W - 1, that it was added to.
    max_sequence_lengths : Tensor
        [B], of the same dtype: steps of each request; beyond T counts as T.
    end_token : int
        Fills a sequence after its first end token, and after its last step.

    Returns
    -------
    Tensor
        [T, B, W].

    Raises
    ------
    ValueError, TypeError
        Wrong types, shapes or dtypes, or a trace comes to a parent that is no beam.
    """
    op = "gather_tree"
    check_dense_tensors(
        op, step_ids=step_ids, parent_ids=parent_ids, max_sequence_lengths=max_sequence_lengths
    )
    end_token = check_int(op, "end_token", end_token, limits="an int64")
    return ops.gather_tree(
        step_ids.contiguous(), parent_ids.contiguous(), max_sequence_lengths.contiguous(), end_token
    )
