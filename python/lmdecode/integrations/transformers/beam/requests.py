"""A ``GenerationConfig`` as the options of a ``BeamRequest``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["request_options", "tokens_of"]


def tokens_of(value: Any) -> list[int]:
    """Return the tokens of None, one token or several."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        value = value.tolist()
    return [value] if isinstance(value, int) else list(value)


def request_options(config: Any, prompt_length: int) -> dict[str, Any]:
    """Return the keyword arguments of ``BeamRequest``, all but its id.

    ``config`` is a ``GenerationConfig`` as ``generate()`` prepares it, or an object with its
    attributes. ``max_length`` and ``min_length`` count the prompt; ``bad_words_ids`` are ignored.
    Raises ValueError where ``sequence_bias`` has sequences of several tokens.
    """
    sequence_bias = getattr(config, "sequence_bias", None) or {}
    items = sequence_bias.items() if isinstance(sequence_bias, dict) else sequence_bias
    bias = {tuple(tokens): value for tokens, value in items}
    if any(len(tokens) != 1 for tokens in bias):
        raise ValueError("sequence_bias has sequences; expected single tokens")
    shortest = max(config.min_new_tokens or 0, (config.min_length or 0) - prompt_length, 0)
    pad, penalty = config.pad_token_id, config.repetition_penalty
    return {
        "max_new_tokens": config.max_length - prompt_length,
        "num_beams": config.num_beams,
        "num_return_sequences": config.num_return_sequences,
        "length_penalty": config.length_penalty,
        "early_stopping": config.early_stopping,
        "eos_token_id": tokens_of(config.eos_token_id),
        "pad_token_id": None if pad is None or int(pad) < 0 else int(pad),
        "min_new_tokens": shortest,
        "repetition_penalty": 1.0 if penalty is None else penalty,
        "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
        "suppress_tokens": tokens_of(config.suppress_tokens),
        "forced_bos_token_id": config.forced_bos_token_id,
        "forced_eos_token_id": config.forced_eos_token_id,
        "logit_bias": {tokens[0]: value for tokens, value in bias.items()},
    }
