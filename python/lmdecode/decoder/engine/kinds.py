"""The parts of an ``Engine`` for each of the two kinds of models, with checked arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lmdecode._checks import check_choice, check_int
from lmdecode.beam.engine.request import BeamRequest
from lmdecode.decoder.causal_caches import (
    CHECKPOINT_INTERVAL,
    CausalCaches,
    check_sizes_of_batch,
)
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.causal_steps import CausalSteps
from lmdecode.decoder.engine.drafts import Drafting, Drafts
from lmdecode.decoder.engine.encoder_decoder_steps import EncoderDecoderSteps
from lmdecode.decoder.engine.encoder_inputs import Encoder, EncoderInputs
from lmdecode.decoder.engine.model_steps import ModelSteps
from lmdecode.decoder.engine.stored_prompts import StoredPrompts
from lmdecode.decoder.engine.submission import Submission
from lmdecode.decoder.searches import length_limits
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.sampling.sampler_rows import SAMPLER_DIALECTS

__all__ = ["EngineParts", "causal_parts", "encoder_decoder_parts"]

_OP = "Engine"
_DEFAULT_BEAMS = 4


class EngineParts(NamedTuple):
    """Parts of an engine that depend on the kind of model.

    ``steps`` runs the model, ``submission`` checks requests, ``max_requests`` is the number of
    slots.
    """

    steps: ModelSteps
    submission: Submission
    max_requests: int


def causal_parts(
    model: PackedCausalModel,
    *,
    max_requests: int,
    capacity: int,
    max_step_tokens: int,
    dialect: str,
    eos_token_id: tuple[int, ...],
    cache_dtype: str,
    store: Any,
    drafting: Drafting | None,
    **others: Any,
) -> EngineParts:
    """Return the parts of an engine of a decoder-only model; arguments are those of ``Engine``."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{_OP}: {name} is given; expected None for a decoder-only model")
    max_requests, capacity, max_step_tokens = check_sizes_of_batch(
        _OP, model.max_positions, max_requests, capacity, max_step_tokens
    )
    if max_step_tokens < max_requests:
        raise ValueError(
            f"{_OP}: max_step_tokens is {max_step_tokens}; expected at least {max_requests}, "
            "max_requests: a step reads a token of each"
        )
    check_choice(_OP, "dialect", dialect, SAMPLER_DIALECTS)
    caches = CausalCaches(
        model,
        max_requests,
        capacity,
        dtype=cache_dtype,
        max_rows=max_step_tokens,
        rollback=0 if drafting is None else drafting.most,
        checkpoint_interval=CHECKPOINT_INTERVAL,
    )
    drafts = None
    if drafting is not None:
        drafts = Drafts(
            drafting,
            rows=max_requests,
            capacity=capacity,
            dialect=dialect,
            max_step_tokens=max_step_tokens,
        )
    most_beams = max_requests, "max_requests"
    submission = Submission(model.config.vocab_size, capacity, most_beams, dialect, eos_token_id)
    stored = None if store is None else StoredPrompts(store, caches)
    steps = CausalSteps(caches, max_step_tokens, stored, drafts)
    return EngineParts(steps, submission, max_requests)


def encoder_decoder_parts(
    decoder: PackedDecoder,
    *,
    max_requests: int,
    capacity: int,
    max_step_tokens: int,
    dialect: str,
    eos_token_id: tuple[int, ...],
    cache_dtype: str,
    store: Any,
    num_beams: int | None,
    source: int | None,
    encoder: Encoder | None,
    decoder_start_token_id: int | None,
    request_of_config: Callable[[Any, Any], BeamRequest] | None,
    drafting: Drafting | None,
) -> EngineParts:
    """Return the parts of an engine of an encoder-decoder model; arguments as of ``Engine``."""
    refused = {
        "store": store is not None,
        "cache_dtype": cache_dtype != "float32",
        "drafting": drafting is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ValueError(f"{_OP}: {name} is given; expected none for an encoder-decoder model")
    longest = min((most for most, _ in length_limits(decoder)), default=None)
    max_requests, capacity, max_step_tokens = check_sizes_of_batch(
        _OP, longest, max_requests, capacity, max_step_tokens
    )
    check_choice(_OP, "dialect", dialect, SAMPLER_DIALECTS)
    if source is None and encoder is not None and not encoder.takes_tokens:
        source = encoder.longest
    if source is None:
        raise TypeError(f"{_OP}: source is missing; expected an int")
    source = check_int(_OP, "source", source, 1, 1 << 30, limits="1 to 2^30")
    num_beams = _DEFAULT_BEAMS if num_beams is None else num_beams
    num_beams = check_int(_OP, "num_beams", num_beams, 1, 1 << 10, limits="1 to 1024")
    steps = EncoderDecoderSteps(
        decoder,
        max_requests=max_requests,
        num_beams=num_beams,
        capacity=capacity,
        source=source,
        max_step_tokens=max_step_tokens,
    )
    assert decoder.config.memory_size is not None
    submission = Submission(
        decoder.config.vocab_size,
        capacity,
        (num_beams, "num_beams"),
        dialect,
        eos_token_id,
        EncoderInputs(encoder, source, decoder.config.memory_size),
        decoder_start_token_id,
        request_of_config,
    )
    return EngineParts(steps, submission, max_requests)
