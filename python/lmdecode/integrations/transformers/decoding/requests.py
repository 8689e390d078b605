"""A ``GenerationConfig`` as a ``BeamRequest``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from lmdecode.beam.engine.request import BeamRequest
from lmdecode.generation_options import NEUTRAL, option_names
from lmdecode.integrations.transformers.decoding.ctranslate2_rules import with_defaults
from lmdecode.integrations.transformers.generate_call import is_of_ctranslate2

__all__ = ["request_of_config", "request_options"]

_OP = "generation_config"
_DEFAULT_NEW_TOKENS = 20
_OF_SEARCHES = option_names("search", "searches", batch="takes")
_TAKEN = option_names(batch="takes")
# generate() ignores the others, too, without sampling, an assistant or a cache of transformers.
_KNOWN = frozenset((*_TAKEN, *option_names(batch="ignores")))


def _tokens_of(value: Any) -> list[int]:
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
        **{name: getattr(config, name) for name in _OF_SEARCHES},
        "max_new_tokens": config.max_length - prompt_length,
        "eos_token_id": _tokens_of(config.eos_token_id),
        "pad_token_id": None if pad is None or int(pad) < 0 else int(pad),
        "min_new_tokens": shortest,
        "repetition_penalty": 1.0 if penalty is None else penalty,
        "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
        "suppress_tokens": _tokens_of(config.suppress_tokens),
        "logit_bias": {tokens[0]: value for tokens, value in bias.items()},
    }


def _is_off(name: str, value: object) -> bool:
    if value is None or value is False:
        return True
    if NEUTRAL.get(name):
        return value == NEUTRAL[name]
    return isinstance(value, (int, float, list, tuple, dict)) and not value


def _effective(config: Any, model: Any) -> SimpleNamespace:
    """Return the config's values, or the model's for None; raise for unsupported values."""
    values: dict[str, Any] = {}
    for source in (config, getattr(model, "generation_config", None)):
        for name, value in ({} if source is None else vars(source)).items():
            if not name.startswith("_") and values.get(name) is None:
                values[name] = value
    is_of_folder = is_of_ctranslate2(model)
    if is_of_folder:
        values = with_defaults(model, values)
    for name, value in values.items():
        if name == "renormalize_logits" and is_of_folder:
            continue
        if name in _KNOWN or _is_off(name, value):
            continue
        raise ValueError(f"{_OP}: {name} is {value!r}; expected none: a batch does nothing of it")
    for name in _TAKEN:
        if values.get(name) is None:
            values[name] = NEUTRAL[name]
    return SimpleNamespace(**values)


def _bad_words(config: SimpleNamespace) -> list[int]:
    """Return the bad words, each of one token, without end tokens, as in ``generate()``."""
    words = config.bad_words_ids or []
    if any(len(word) != 1 for word in words):
        raise ValueError(f"{_OP}: bad_words_ids is {words}; expected words of one token in a batch")
    ends = _tokens_of(config.eos_token_id)
    tokens = [word[0] for word in words if word[0] not in ends]
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        if getattr(config, name) in tokens:
            raise ValueError(
                f"{_OP}: {name} is {getattr(config, name)}; expected no token of bad_words_ids"
            )
    return tokens


def _set_lengths(config: SimpleNamespace, prompt: int, model: Any) -> None:
    """Make lengths count the prompt, as ``generate()`` does."""
    if config.max_new_tokens is not None:
        config.max_length = config.max_new_tokens + prompt
    elif config.max_length is None:
        config.max_length = _DEFAULT_NEW_TOKENS + prompt
        most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if most is not None:
            config.max_length = min(config.max_length, most)
    if config.max_length <= prompt:
        raise ValueError(
            f"{_OP}: max_length is {config.max_length}; expected more than the {prompt} tokens of "
            "the prompt"
        )
    if config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + prompt


def request_of_config(prompt_ids: Any, generation_config: Any, model: Any = None) -> BeamRequest:
    """Return the request that searches as ``generate()`` does with a config; greedily with 1 beam.

    ``prompt_ids`` is the decoder's prompt, [length]; None: ``decoder_start_token_id``, or else
    ``bos_token_id``. Values that are None come from the config of ``model``, if there is one.
    Raises ValueError or TypeError that names a value that a request cannot express.
    """
    if not hasattr(generation_config, "max_new_tokens"):
        kind = type(generation_config).__name__
        raise TypeError(f"{_OP} is of type {kind}; expected a GenerationConfig of transformers")
    config = _effective(generation_config, model)
    if prompt_ids is None:
        start = config.decoder_start_token_id
        prompt_ids = _tokens_of(config.bos_token_id if start is None else start)
        if len(prompt_ids) > 1:  # generate() reads several as one token of each prompt
            raise ValueError(
                f"{_OP}: decoder_start_token_id is {list(prompt_ids)}; expected one token"
            )
        if not prompt_ids:
            raise ValueError(
                f"{_OP}: decoder_start_token_id is None; expected a token where there is no prompt"
            )
    prompt_ids = _tokens_of(prompt_ids)
    _set_lengths(config, len(prompt_ids), model)
    if config.num_beams == 1:
        # Greedy search ends at the first end token. It penalises logits, which a request does not.
        config.early_stopping = True
        if config.repetition_penalty != 1.0:
            raise ValueError(
                f"{_OP}: repetition_penalty is {config.repetition_penalty}; expected 1 with one "
                "beam in a batch, which penalises log-probabilities and not logits"
            )
    if config.early_stopping is None:
        config.early_stopping = False
    options = request_options(config, len(prompt_ids))
    options["suppress_tokens"] += _bad_words(config)
    return BeamRequest(prompt_ids, **options)
