"""The options of drafts, as ``generate()`` of transformers names them."""

from __future__ import annotations

from typing import Any

from lmdecode._checks import check_choice, check_count, check_int, check_number, type_error
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.engine.assistant_drafts import Assistant
from lmdecode.decoder.engine.drafts import Drafting
from lmdecode.decoder.engine.lookup_drafts import PromptLookup

__all__ = ["drafting_of", "is_padding"]

_NUM_TOKENS = 5
_CONFIDENCE_THRESHOLD = 0.4
_SCHEDULES = ("constant", "heuristic_transient")
_MOST = 1 << 10  # tokens of an assistant's draft
_MATCHING_NGRAM = 2  # the default of transformers
_PADDING = 0.01  # of a vocabulary: of Qwen 2.5's 0.1 %, of Gemma 3's 0.03 %, of Pythia's 0.8 %


def is_padding(size: int, other: int) -> bool:
    """Tell whether two sizes of a vocabulary may differ by its padding alone."""
    return abs(size - other) <= _PADDING * max(size, other)


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
    """Return the settings of drafts; None: there are none.

    Parameters
    ----------
    op
        For errors.
    model
        The model that reads the drafts: a packed model, of a ``Decoding``.
    assistant_model, num_assistant_tokens, assistant_confidence_threshold
        See ``Decoding.engine``.
    num_assistant_tokens_schedule, prompt_lookup_num_tokens, max_matching_ngram_size
        See ``Decoding.engine``.
    has_same_tokens
        The model and the assistant are known to have one tokenizer: their vocabularies may be of
        any sizes.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
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
    assistant = getattr(assistant_model, "decoder", None)
    if not isinstance(assistant, PackedCausalModel):
        expected = "a lmdecode.Decoding of a decoder-only model"
        raise type_error(op, "assistant_model", assistant_model, expected)
    vocab, own = model.config.vocab_size, assistant.config.vocab_size
    if not has_same_tokens and not is_padding(own, vocab):
        raise ValueError(
            f"{op}: assistant_model has a vocabulary of {own} tokens; expected {vocab}, that of "
            f"the model, or so with padding, at most {_PADDING:.0%} more or fewer"
        )
    count, threshold = num_assistant_tokens, assistant_confidence_threshold
    count = _NUM_TOKENS if count is None else count
    threshold = _CONFIDENCE_THRESHOLD if threshold is None else threshold
    limits = f"1 to {_MOST}"
    count = check_int(op, "num_assistant_tokens", count, 1, _MOST, limits=limits)
    threshold = check_number(op, "assistant_confidence_threshold", threshold)
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"{op}: assistant_confidence_threshold is {threshold}; expected 0 to 1")
    schedule: Any = num_assistant_tokens_schedule or _SCHEDULES[0]
    check_choice(op, "num_assistant_tokens_schedule", schedule, _SCHEDULES)
    return Assistant(count, threshold, schedule, assistant, vocab, assistant_model.cache_dtype)
