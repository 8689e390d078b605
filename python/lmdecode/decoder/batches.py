"""Continuous batching of a ``Decoding``: batches and the engine."""

from __future__ import annotations

from functools import cached_property
from typing import Any, overload

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.decoder.batch import DecodingBatch
from lmdecode.decoder.causal_batch import CausalBatch
from lmdecode.decoder.device_loop import DeviceDecoder
from lmdecode.decoder.engine import Engine
from lmdecode.decoder.engine.model_drafts import drafting_of
from lmdecode.decoder.spares import Spares
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["Batches"]

_KEPT_ENGINES = 4


class Batches:
    """Base of ``Decoding`` with its attributes: the packed model, and what belongs to it.

    ``model`` is the transformers model, its stand-in, or None. ``encoder`` is None without an
    encoder; ``cache_dtype`` is used by decoder-only models alone.
    """

    decoder: PackedDecoder | DeviceDecoder | PackedCausalModel
    model: Any
    encoder: Any
    cache_dtype: str

    @overload
    def batch(
        self, *, max_requests: int, capacity: int, max_step_tokens: int = 512
    ) -> CausalBatch: ...

    @overload
    def batch(
        self,
        *,
        max_requests: int,
        capacity: int,
        num_beams: int,
        source: int,
        max_end_tokens: int = 4,
        max_suppressed: int = 64,
        generation_config: Any = None,
    ) -> DecodingBatch: ...

    def batch(
        self,
        *,
        max_requests: int,
        capacity: int,
        num_beams: int | None = None,
        source: int | None = None,
        max_end_tokens: int = 4,
        max_suppressed: int = 64,
        generation_config: Any = None,
        max_step_tokens: int = 512,
    ) -> DecodingBatch | CausalBatch:
        """Return a batch that requests come to and leave between steps.

        Of an encoder-decoder model a ``DecodingBatch``, whose requests search by themselves; of a
        decoder-only model a ``CausalBatch``, which gives logits and takes tokens.

        Parameters
        ----------
        max_requests, capacity : int
            Places; the most tokens of a sequence, prompt and new ones.
        num_beams, source : int
            Of an encoder-decoder model: the most beams of a request; the most positions of a
            memory, which is what the encoder gives.
        max_end_tokens, max_suppressed : int
            Of an encoder-decoder model: the longest lists that a request may have of these.
        generation_config : transformers.GenerationConfig, optional
            Of an encoder-decoder model: how requests search that ``add`` is given as prompts.
        max_step_tokens : int
            Of a decoder-only model: the most tokens of a step.

        Raises
        ------
        ValueError
            The decoder is on a device: batches are of the CPU; or what the other kind takes.
        """
        if isinstance(self.decoder, DeviceDecoder):
            raise ValueError(
                f"Decoding.batch: the decoder is on {self.decoder.device}; expected cpu"
            )
        others: dict[str, Any] = {"num_beams": num_beams, "source": source}
        if isinstance(self.decoder, PackedCausalModel):
            for name, value in (*others.items(), ("generation_config", generation_config)):
                if value is not None:
                    raise ValueError(
                        f"Decoding.batch: {name} is given; expected None for a decoder-only model"
                    )
            return CausalBatch(
                self.decoder,
                max_requests=max_requests,
                capacity=capacity,
                max_step_tokens=max_step_tokens,
                cache_dtype=self.cache_dtype,
            )
        for name, value in others.items():
            if value is None:
                raise TypeError(f"Decoding.batch: {name} is missing; expected an int")
        return DecodingBatch(
            self.decoder,
            max_requests=max_requests,
            capacity=capacity,
            **others,
            max_end_tokens=max_end_tokens,
            max_suppressed=max_suppressed,
            generation_config=generation_config,
            request_of_config=self._request_of_config,
        )

    @cached_property
    def spare_engines(self) -> Spares[Engine]:
        """Idle engines of calls of ``generate``, by their sizes."""
        return Spares(_KEPT_ENGINES)

    def _request_of_config(self, prompt_ids: Any, generation_config: Any) -> BeamRequest:
        raise NotImplementedError

    def _check_store(self, store: Any) -> None:
        raise NotImplementedError

    def _generation_default(self, name: str) -> Any:
        """Return an entry of the model's generation config, or None."""
        return getattr(getattr(self.model, "generation_config", None), name, None)

    def engine(
        self,
        *,
        max_requests: int,
        capacity: int,
        max_step_tokens: int = 512,
        dialect: str = "transformers",
        store: Any = None,
        num_beams: int | None = None,
        source: int | None = None,
        assistant_model: Any = None,
        num_assistant_tokens: int | None = None,
        assistant_confidence_threshold: float | None = None,
        num_assistant_tokens_schedule: str | None = None,
        prompt_lookup_num_tokens: int | None = None,
        max_matching_ngram_size: int | None = None,
        cache_bytes: int | None = None,
    ) -> Engine:
        """Return an engine: requests in, texts out.

        Parameters
        ----------
        max_requests, capacity, max_step_tokens, dialect, num_beams, source, cache_bytes
            See ``Engine``. What ends a text is what ends it for ``generate``.
        store : KVStore, optional
            Of a decoder-only model, opened with ``fingerprint()``: prompts that are stored need not
            be read.
        assistant_model : Decoding or "mtp", optional
            A smaller decoder-only model with the same tokens, for a decoder-only model. Its
            vocabulary may be padded differently, by 1 % at most. It drafts tokens, which a step
            reads at once. Texts are bitwise the same as without. More than 8 texts at once have no
            drafts. Its keys and values take memory for as many requests. "mtp": the model's own
            layer for multi-token prediction drafts, where it was loaded.
        num_assistant_tokens : int, optional
            Number of tokens of a draft, 1 to 1024; 5 by default, 3 with "mtp".
        assistant_confidence_threshold : float, optional
            0 to 1: a draft ends with a token of a lower probability; 0.4 by default.
        num_assistant_tokens_schedule : {"constant", "heuristic_transient"}, optional
            "heuristic_transient": the drafts of a text get 2 tokens longer, up to 4 times
            ``num_assistant_tokens``, when all were accepted, and else a token shorter.
        prompt_lookup_num_tokens, max_matching_ngram_size : int, optional
            ``num_tokens`` and ``max_ngram`` (2 by default) of ``prompt_lookup``, which drafts
            instead of an assistant.

        Raises
        ------
        ValueError, TypeError
            Names the argument, what came and what was expected; or the decoder is on a device; or
            the store is another model's.
        """
        if isinstance(self.decoder, DeviceDecoder):
            raise ValueError(
                f"Decoding.engine: the decoder is on {self.decoder.device}; expected cpu"
            )
        ends = self._generation_default("eos_token_id")
        if ends is None:
            ends = ()
        drafting = drafting_of(
            "Decoding.engine",
            self.decoder,
            assistant_model=assistant_model,
            num_assistant_tokens=num_assistant_tokens,
            assistant_confidence_threshold=assistant_confidence_threshold,
            num_assistant_tokens_schedule=num_assistant_tokens_schedule,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            max_matching_ngram_size=max_matching_ngram_size,
        )
        more: dict[str, Any] = {}
        if isinstance(self.decoder, PackedCausalModel):
            more["cache_dtype"] = self.cache_dtype
            if store is not None:
                self._check_store(store)
        else:
            start = self._generation_default("decoder_start_token_id")
            if start is None:
                start = self._generation_default("bos_token_id")
            more["decoder_start_token_id"] = start if isinstance(start, int) else None
            more |= {"encoder": self.encoder, "request_of_config": self._request_of_config}
        return Engine(
            self.decoder,
            max_requests=max_requests,
            capacity=capacity,
            max_step_tokens=max_step_tokens,
            dialect=dialect,
            store=store,
            num_beams=num_beams,
            source=source,
            drafting=drafting,
            cache_bytes=cache_bytes,
            **more,
            eos_token_id=(ends,) if isinstance(ends, int) else tuple(ends),
        )
