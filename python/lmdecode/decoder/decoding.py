"""Decoding in C++: the decoder of an encoder-decoder model, its search and its caches."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.decoder.batch import DecodingBatch
from lmdecode.decoder.checks import check_weights
from lmdecode.decoder.config import DecoderConfig, DecoderWeights
from lmdecode.decoder.device_loop import DeviceDecoder
from lmdecode.decoder.weights import PackedDecoder

__all__ = ["Decoding"]


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
    dtype : {"float32", "bfloat16", "int8", "int4"}
        What linear weights are held and multiplied as; see docs/reference/decoder.md. "float32"
        gives the tokens of transformers; the others' scores are near, so that close tokens may
        differ. On a device "float32", "float16" and "bfloat16". ``torch.bfloat16`` and "bf16" are
        taken, too.
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
        dtype: str | torch.dtype = "float32",
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
        cls, model: Any, dtype: str | torch.dtype = "float32", *, use_cuda_graph: bool = False
    ) -> Decoding:
        """Take the decoder of a transformers model, which is loaded where its name is given.

        Parameters
        ----------
        model
            A conditional generation model of Marian, BART, mBART, T5, mT5 or Whisper, or the folder
            or name of one, which is loaded with float32 weights. It is kept: its encoder runs as
            it is.
        dtype : {"float32", "bfloat16", "int8", "int4"}
            See the class.
        use_cuda_graph : bool
            See the class.

        Raises
        ------
        ValueError
            Another model, or another dtype.
        OSError
            There is no model of this name.
        """
        from lmdecode.integrations.transformers.decoding.models import decoder_of, load_model

        if isinstance(model, (str, os.PathLike)):
            model = load_model(model)
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
        generation_config: Any = None,
    ) -> DecodingBatch:
        """Return a batch that requests come to and leave between steps; see there.

        Parameters
        ----------
        max_requests, num_beams, capacity, source : int
            Places; the most beams of a request; the most tokens of a sequence, prompt and new ones;
            the most positions of a memory, which is what the encoder gives.
        max_end_tokens, max_suppressed : int
            The longest lists that a request may have of these.
        generation_config : transformers.GenerationConfig, optional
            How requests search that ``add`` is given as prompts.

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
            generation_config=generation_config,
            request_of_config=self._request_of_config,
        )

    def _request_of_config(self, prompt_ids: Any, generation_config: Any) -> BeamRequest:
        from lmdecode.integrations.transformers.decoding.requests import request_of_config

        return request_of_config(prompt_ids, generation_config, self.model)

    @property
    def config(self) -> DecoderConfig:
        """Return the decoder's config."""
        return self.decoder.config

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, **arguments: Any) -> Any:
        """Return what ``model.generate(...)`` returns, without sampling.

        With the format "float32" the tokens are those of transformers. It may stand in for the
        model's own: ``model.generate = decoding.generate``.

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
        if arguments.get("streamer") is not None:  # before generate() gives it the prompt
            raise ValueError(
                "Decoding.generate: streamer is given; expected none, tokens stay in C++ until the "
                "search has ended"
            )
        from lmdecode.integrations.transformers.decoding.generation import decode

        tokenizer = arguments.get("tokenizer")
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
            stop_strings: Any = None,
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
                stop_strings=stop_strings,
                tokenizer=tokenizer,
                **model_kwargs,
            )

        # A cache is of no use here, and a good part of a small model's call to prepare.
        config = arguments.get("generation_config")
        if "use_cache" not in arguments:
            if config is None:
                arguments["use_cache"] = False
            else:  # beside which generate() does not want arguments
                arguments["generation_config"] = config = copy.deepcopy(config)
                config.use_cache = False
        generate = self.model.generate
        if isinstance(getattr(generate, "__self__", None), Decoding):  # put there by the caller
            generate = partial(type(self.model).generate, self.model)
        positional = () if inputs is None else (inputs,)
        return generate(*positional, custom_generate=loop, **arguments)
