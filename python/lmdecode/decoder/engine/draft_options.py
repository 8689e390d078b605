"""The options of drafts, as ``generate()`` of transformers names them."""

from __future__ import annotations

from typing import Any

from lmdecode._checks import check_choice, check_count, check_int, check_number, type_error
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.assistant_drafts import Assistant
from lmdecode.decoder.engine.drafts import Drafting
from lmdecode.decoder.engine.lookup_drafts import PromptLookup
from lmdecode.decoder.engine.mtp_drafts import Mtp

__all__ = ["drafting_of", "is_padding"]

_NUM_TOKENS = 5
_NUM_MTP_TOKENS = 3  # a layer that has learned to predict one more is less sure of further ones
_MTP = "mtp"
_CONFIDENCE_THRESHOLD = 0.4
_SCHEDULES = ("constant", "heuristic_transient")
_MOST = 1 << 10  # tokens of an assistant's draft
_MATCHING_NGRAM = 2  # the default of transformers
_PADDING = 0.01  # of a vocabulary: of Qwen 2.5's 0.1 %, of Gemma 3's 0.03 %, of Pythia's 0.8 %


def is_padding(size: int, other: int) -> bool:
    """Tell whether two sizes of a vocabulary may differ by its padding alone."""
    return abs(size - other) <= _PADDING * max(size, other)


def _assistant_of(
    op: str, model: PackedCausalModel, assistant_model: Any, has_same_tokens: bool
) -> PackedCausalModel:
    """Return the model that drafts."""
    if isinstance(assistant_model, str) and assistant_model == _MTP:
        if model.mtp is None:
            raise ValueError(
                f"{op}: assistant_model is 'mtp' for a model without these weights; expected one "
                "that Decoding.from_pretrained loaded with mtp=True"
            )
        return model.mtp
    assistant = getattr(assistant_model, "decoder", None)
    if not isinstance(assistant, PackedCausalModel):
        expected = "a lmdecode.Decoding of a decoder-only model, or 'mtp'"
        raise type_error(op, "assistant_model", assistant_model, expected)
    vocab, own = model.config.vocab_size, assistant.config.vocab_size
    if not has_same_tokens and not is_padding(own, vocab):
        raise ValueError(
            f"{op}: assistant_model has a vocabulary of {own} tokens; expected {vocab}, that of "
            f"the model, or so with padding, at most {_PADDING:.0%} more or fewer"
        )
    return assistant


def drafting_of(
    op: str,
    model: Any,
    *,
    assistant_model: Any = None,
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    num_assistant_tokens_schedule: str | None = None,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    has_same_tokens: bool = False,
) -> Drafting | None:
    """Return the settings of drafts, None if there are none; ``op`` is for errors.

    ``model`` is the packed model that reads the drafts. ``has_same_tokens``: the model and the
    assistant are known to have one tokenizer, so their vocabularies may be of any sizes. For the
    others see ``Decoding.engine``. Raises ValueError or TypeError that names the argument.
    """
    if assistant_model is None and prompt_lookup_num_tokens is None:
        return None
    if not isinstance(model, PackedCausalModel):
        name = "prompt_lookup_num_tokens" if assistant_model is None else "assistant_model"
        raise ValueError(f"{op}: {name} is given; expected None for an encoder-decoder model")
    if assistant_model is None:
        size = _MATCHING_NGRAM if max_matching_ngram_size is None else max_matching_ngram_size
        return PromptLookup(
            check_count(op, "prompt_lookup_num_tokens", prompt_lookup_num_tokens),
            check_count(op, "max_matching_ngram_size", size),
        )
    if prompt_lookup_num_tokens is not None:
        raise ValueError(
            f"{op}: prompt_lookup_num_tokens is {prompt_lookup_num_tokens}; expected None with an "
            "assistant_model"
        )
    assistant = _assistant_of(op, model, assistant_model, has_same_tokens)
    count, threshold = num_assistant_tokens, assistant_confidence_threshold
    if count is None:
        count = _NUM_MTP_TOKENS if assistant is model.mtp else _NUM_TOKENS
    threshold = _CONFIDENCE_THRESHOLD if threshold is None else threshold
    limits = f"1 to {_MOST}"
    count = check_int(op, "num_assistant_tokens", count, 1, _MOST, limits=limits)
    threshold = check_number(op, "assistant_confidence_threshold", threshold)
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"{op}: assistant_confidence_threshold is {threshold}; expected 0 to 1")
    schedule: Any = num_assistant_tokens_schedule or _SCHEDULES[0]
    check_choice(op, "num_assistant_tokens_schedule", schedule, _SCHEDULES)
    if assistant is model.mtp:
        return Mtp(count, threshold, schedule, assistant)
    vocab, cache_dtype = model.config.vocab_size, assistant_model.cache_dtype
    return Assistant(count, threshold, schedule, assistant, vocab, cache_dtype)
