"""Decoding in C++: the decoder of an encoder-decoder model, its search and its caches."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmdecode import _fakes  # noqa: F401  registers the fakes
from lmdecode._decoder_checks import check_floats, check_weights, indices
from lmdecode._decoding_cuda import DeviceDecoder
from lmdecode._library import ops
from lmdecode._tensor_checks import check_dense_tensors, check_no_gradient
from lmdecode.decoder_batch import DecodingBatch
from lmdecode.decoder_config import FORMATS, DecoderConfig, DecoderWeights, LayerWeights, float32
from lmdecode.decoder_state import DecodingCaches, new_caches
from lmdecode.decoder_weights import PackedDecoder, pack_layer

__all__ = ["DecoderLayer", "Decoding", "gather_tree"]


class Decoding:
    """The decoder of an encoder-decoder model, with its whole loop in C++.

    Embedding, layers, projection to the vocabulary, logits processors, beam search and early stop
    run step after step without a return to Python; keys and values of the memory are computed once
    a request and shared by its beams, those of the sequences stay where they were written. A result
    depends on nothing but its own request: not on the batch, nor on the number of threads.

    Parameters
    ----------
    config : DecoderConfig
        Of the decoder.
    weights : DecoderWeights
        Packed here, once. Weights on a CUDA device stay there, and the loop runs there.
    dtype : {"float32", "bfloat16", "int8"}
        What linear weights are held and multiplied as; see docs/reference/decoder.md. On a
        device "float32", "float16" and "bfloat16".
    use_cuda_graph : bool
        On a device: each search captures its step in a CUDA graph, and replays it.

    Raises
    ------
    ValueError, TypeError
        A weight of a wrong shape, dtype or type, another ``dtype``, or a graph without a device.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        dtype: str = "float32",
        use_cuda_graph: bool = False,
    ) -> None:
        check_weights(config, weights)
        self.decoder: PackedDecoder | DeviceDecoder
        device = weights.embedding.device
        if device.type == "cuda":
            self.decoder = DeviceDecoder(config, weights, dtype, use_cuda_graph=use_cuda_graph)
        elif use_cuda_graph:
            raise ValueError(
                f"Decoding: use_cuda_graph is True with weights on {device}; expected them on cuda"
            )
        else:
            self.decoder = PackedDecoder(config, weights, dtype)
        self.model: Any = None

    @classmethod
    def from_pretrained(
        cls, model: Any, dtype: str = "float32", *, use_cuda_graph: bool = False
    ) -> Decoding:
        """Take the decoder of a loaded transformers model.

        Parameters
        ----------
        model
            A conditional generation model of Marian, BART, mBART, T5, mT5 or Whisper. It is kept:
            its encoder runs as it is.
        dtype : {"float32", "bfloat16", "int8"}
            See the class.
        use_cuda_graph : bool
            See the class.

        Raises
        ------
        ValueError
            Another model, or another dtype.
        """
        from lmdecode.integrations.transformers.decoder_models import decoder_of

        decoding = cls(*decoder_of(model), dtype=dtype, use_cuda_graph=use_cuda_graph)
        decoding.model = model
        return decoding

    def batch(
        self,
        *,
        max_requests: int,
        num_beams: int,
        capacity: int,
        source: int,
        max_end_tokens: int = 4,
        max_suppressed: int = 64,
    ) -> DecodingBatch:
        """Return a batch that requests come to and leave between steps; see there.

        Raises
        ------
        ValueError
            The decoder is on a device: batches are of the CPU.
        """
        if not isinstance(self.decoder, PackedDecoder):
            raise ValueError(
                f"Decoding.batch: the decoder is on {self.decoder.device}; expected cpu"
            )
        return DecodingBatch(
            self.decoder,
            max_requests=max_requests,
            num_beams=num_beams,
            capacity=capacity,
            source=source,
            max_end_tokens=max_end_tokens,
            max_suppressed=max_suppressed,
        )

    @property
    def config(self) -> DecoderConfig:
        """Return the decoder's config."""
        return self.decoder.config

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, **arguments: Any) -> Any:
        """Return what ``model.generate(...)`` returns, without sampling.

        Parameters
        ----------
        inputs : Tensor, optional
            ``input_ids`` or ``input_features``, as for the model.
        **arguments
            Those of the model's ``generate()``: ``num_beams`` (1: greedy), lengths, penalties,
            ``num_return_sequences``, end tokens, forced, suppressed and bad tokens,
            ``decoder_input_ids``, ``encoder_outputs``, ``attention_mask``, ``num_beam_groups``,
            ``return_dict_in_generate`` with ``output_scores`` and so on, with the model's
            ``generation_config`` for defaults. Processors and criteria that the loop in C++ does
            not have are called step by step.

        Raises
        ------
        ValueError
            Names an argument that this cannot do; nothing is ignored.
        """
        if self.model is None:
            raise ValueError(
                "Decoding.generate: there is no model; expected one, by Decoding.from_pretrained"
            )
        if "custom_generate" in arguments:
            raise ValueError(
                "Decoding.generate: custom_generate is given; expected none, the loop is Decoding's"
            )
        from lmdecode.integrations.transformers.decoding import decode

        if isinstance(arguments.get("encoder_outputs"), dict):
            # generate() writes the outputs of the beams to it.
            arguments["encoder_outputs"] = copy.copy(arguments["encoder_outputs"])

        def loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            synced_gpus: bool | None = None,
            streamer: Any = None,
            **model_kwargs: Any,
        ) -> Any:
            return decode(
                self.decoder,
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )

        # Of no use here, and a good part of a small model's call to prepare.
        arguments.setdefault("use_cache", False)
        positional = () if inputs is None else (inputs,)
        return self.model.generate(*positional, custom_generate=loop, **arguments)


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
    dtype : {"float32", "bfloat16", "int8"}
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
        dtype: str = "float32",
    ) -> None:
        op = "DecoderLayer"
        if not isinstance(config, DecoderConfig):
            raise TypeError(
                f"{op}: config is of type {type(config).__name__}; expected a DecoderConfig"
            )
        if dtype not in tuple(FORMATS):
            raise ValueError(f"{op}: dtype is {dtype!r}; expected one of {', '.join(FORMATS)}")
        if relative_bias is not None:
            check_floats(op, "relative_bias", relative_bias)
            shape, heads = relative_bias.shape, config.num_heads
            if len(shape) != 2 or shape[0] != heads or shape[1] < 1:
                raise ValueError(
                    f"{op}: relative_bias has shape {list(shape)}; expected [{heads}, any]"
                )
        self.config = replace(config, num_layers=1)
        self.relative_bias = float32(relative_bias)
        self._sizes = self.config.sizes(dtype)
        self._tensors = pack_layer(self.config, weights, dtype)

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
            In whose ``table`` every row is its own.

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
        for name, size in (("rows", rows), ("capacity", capacity)):
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{op}: {name} is of type {type(size).__name__}; expected an int")
            if not 0 <= size < 1 << 31:
                raise ValueError(f"{op}: {name} is {size}; expected 0 to 2^31 - 1")
        caches = new_caches(config, len(memory), rows, capacity, memory.shape[1])
        caches.table[:] = torch.arange(rows, dtype=torch.int32)[:, None]
        ops.decoding_read_memory_(
            self._tensors,
            self._sizes,
            config.numbers(),
            list(caches),
            float32(memory),
            memory_lengths,
            torch.arange(len(memory)),
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
            [R] integers: whose memory each row attends to; by default the rows are spread evenly.
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
            kind = type(caches).__name__
            raise TypeError(f"{op}: caches is of type {kind}; expected DecodingCaches")
        if from_tensor.dim() != 2:
            shape = list(from_tensor.shape)
            raise ValueError(
                f"{op}: from_tensor has shape {shape}; expected [rows, {self.config.model_size}]"
            )
        rows, count = from_tensor.shape[0], caches.memory_lengths.shape[0]
        own = torch.arange(rows, dtype=torch.int32)
        if requests is None:
            if count == 0 or rows % count:
                raise ValueError(
                    f"{op}: from_tensor has {rows} rows for {count} memories; expected as "
                    "many for each, or requests"
                )
            requests = own // (rows // count)

        return ops.decoder_layer(
            from_tensor.contiguous(),
            self._tensors,
            self._sizes,
            self.config.numbers(),
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
        What is behind the first end token of a sequence, and behind its steps.

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
    if isinstance(end_token, bool) or not isinstance(end_token, int):
        raise TypeError(f"{op}: end_token is of type {type(end_token).__name__}; expected an int")
    if not -(1 << 63) <= end_token < 1 << 63:
        raise ValueError(f"{op}: end_token is {end_token}; expected an int64")
    return ops.gather_tree(
        step_ids.contiguous(), parent_ids.contiguous(), max_sequence_lengths.contiguous(), end_token
    )
