"""The one table of options of generation, from which all others make their lists of options."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

__all__ = ["FUSED", "NEUTRAL", "OPTIONS", "Option", "option_names"]


class Option(NamedTuple):
    """A row of the table.

    The effect "draws": tokens are drawn with it, and it has none where no token is. "drawn": it
    changes what is drawn. "both": it changes the logits, of a search too. "text": how a text begins
    and ends. "search": it makes a search. "searches": of searches alone; "request": of a
    ``BeamRequest`` alone. Of ``generate()`` alone: "processor" is a processor or criterion that no
    ``BeamRequest`` has, "constraints" and "call" another loop or result, "layers" another use of
    the model's layers, "drafts" how an assistant or a prompt drafts, "drafting" other drafts.
    """

    name: str
    effect: str
    neutral: Any = None  # the value without effect, or else the default
    # Of a Sampler: the least and the largest number, where None is any finite one, or tokens.
    sampler: tuple[float | None, float | None] | Literal["tokens"] | None = None
    batch: Literal["takes", "ignores", "refuses"] = "refuses"  # DecodingBatch, in a config
    # generate_batch: "request", "processor", "ignored", or the reason to refuse it. None: no option
    # of transformers' generation config.
    continuous: str | None = None
    # Ray Data: "padded" if it does the same to a row whatever its padding, "row by row", "refused".
    job: str | None = None
    # Of the server: how a field reaches the engine. "default": no request has such a field, but the
    # server follows the entry of the model's generation config.
    field: Literal["passed", "converted", "default"] | None = None
    alias: str | None = None  # that field in other servers
    is_replaced: bool = False  # llama.cpp leaves it out where there is mirostat


def _rows(names: str, *values: Any, **more: Any) -> list[Option]:
    return [Option(name, *values, **more) for name in names.split()]


_INF, _MAX_INT = math.inf, (1 << 63) - 1
_ONE_TEXT, _NO_DRAFTS = "a request is one text", "there are no drafts"
_LOGITS_ALONE = "tokens come of the model's logits alone"
_OTHER_END = "a request ends by eos_token_id and max_new_tokens"
_FILTER = {"batch": "ignores", "continuous": "processor", "field": "passed"}
_FUSED = {"job": "padded", **_FILTER}
_OURS, _CPP, _OF_CONFIG = {"field": "passed"}, {"is_replaced": True}, {"field": "default"}
_EDIT = {"batch": "takes", "continuous": "processor", "field": "passed"}

# Numbers of a Sampler stand in the order of SamplerNumbers and SamplerIntegers of
# csrc/sampling/sampler_state.h, floats among floats and ints among ints.
OPTIONS: tuple[Option, ...] = (
    *_rows("temperature", "draws", 1.0, (0.0, _INF), **_FUSED),
    *_rows("top_k", "draws", 0, (~_MAX_INT, _MAX_INT), **_FUSED, **_CPP),
    *_rows("top_p", "draws", 1.0, (-_INF, 1.0), **_FUSED, **_CPP),
    *_rows("min_p", "draws", 0.0, (-_INF, _INF), **_FUSED, **_CPP),
    *_rows("typical_p", "draws", 1.0, (0.0, 1.0), alias="typical", **_FILTER, **_CPP),
    *_rows("epsilon_cutoff eta_cutoff", "draws", 0.0, (0.0, 1.0), **_FILTER),
    *_rows("top_n_sigma", "draws", 0.0, (-_INF, _INF), **_OURS, **_CPP),
    *_rows("top_h", "draws", 0.0, (0.0, 1.0), **_FILTER),
    *_rows("xtc_probability", "draws", 0.0, (0.0, 1.0), **_OURS, **_CPP),
    *_rows("xtc_threshold", "drawn", 0.1, (0.0, 1.0), **_OURS),
    *_rows("repetition_penalty", "both", 1.0, (0.0, None), alias="repeat_penalty", **_EDIT, **_CPP),
    *_rows("presence_penalty frequency_penalty", "drawn", 0.0, (None, None), **_OURS, **_CPP),
    *_rows("no_repeat_ngram_size", "both", 0, (0, _MAX_INT), **_EDIT),
    *_rows("dry_multiplier", "drawn", 0.0, (0.0, None), **_OURS, **_CPP),
    *_rows("dry_base", "drawn", 1.75, (0.0, None), **_OURS),
    *_rows("dry_allowed_length", "drawn", 2, (0, _MAX_INT), **_OURS),
    *_rows("mirostat_tau", "draws", 0.0, (0.0, None), **_OURS),
    *_rows("mirostat_eta", "drawn", 0.1, (None, None), **_OURS),
    *_rows("dynamic_temperature_range", "draws", 0.0, (0.0, None), alias="dynatemp_range", **_OURS,
           **_CPP),
    *_rows("dynamic_temperature_exponent", "drawn", 1.0, (None, None), alias="dynatemp_exponent",
           **_OURS),
    *_rows("adaptive_target", "draws", -1.0, (None, 1.0), **_OURS),
    *_rows("adaptive_decay", "drawn", 0.9, (0.0, 0.99), **_OURS),
    *_rows("min_tokens", "text", 0, (0, _MAX_INT), field="converted"),
    *_rows("seed", "draws", field="converted"),
    *_rows("logit_bias", "both", None, "tokens", field="converted"),
    *_rows("bad_words_ids suppress_tokens", "both", None, "tokens", **_EDIT),
    *_rows("eos_token_id", "text", None, "tokens", "takes", "request", "padded", "default"),
    *_rows("forced_tokens dry_breakers", "drawn", None, "tokens"),
    *_rows("sequence_bias", "both", continuous="processor", **_OF_CONFIG),
    *_rows("max_new_tokens", "text", None, None, "takes", "request", "padded", "default"),
    *_rows("max_length", "text", None, None, "takes", "request", "refused", "default"),
    *_rows("min_new_tokens", "text", None, None, "takes", "processor", "padded", "default"),
    *_rows("min_length", "text", 0, None, "takes", "processor", "refused", "default"),
    *_rows("max_time", "text", None, None, "refuses", _OTHER_END, "refused"),
    *_rows("bos_token_id", "text", None, None, "takes", "ignored", "padded"),
    *_rows("decoder_start_token_id", "text", None, None, "takes", "ignored"),
    *_rows("num_beams", "search", 1, None, "takes", _ONE_TEXT, "padded", "passed"),
    *_rows("trie", "search"),
    *_rows("num_return_sequences", "searches", 1, None, "takes", "request", "refused"),
    *_rows("length_penalty", "searches", 1.0, None, "takes", "ignored", "padded", "passed"),
    *_rows("early_stopping", "searches", False, None, "takes", "ignored", "padded", "passed"),
    *_rows("num_beam_groups", "searches", 1, continuous=_ONE_TEXT, **_OURS),
    *_rows("diversity_penalty", "searches", 0.0, continuous="ignored", **_OURS),
    *_rows("patience", "searches", 1.0, **_OURS),
    *_rows("pad_token_id", "searches", None, None, "takes", "ignored", "padded"),
    *_rows("forced_bos_token_id forced_eos_token_id", "searches", None, None, "takes", "processor",
           **_OF_CONFIG),
    *_rows("coverage_penalty", "request", 0.0),
    *_rows("dialect", "request", "generate"),
    *_rows("begin_suppress_tokens exponential_decay_length_penalty", "processor",
           continuous="processor"),
    *_rows("remove_invalid_values renormalize_logits", "processor", False, continuous="processor"),
    *_rows("encoder_no_repeat_ngram_size", "processor", 0, continuous="processor"),
    *_rows("encoder_repetition_penalty", "processor", 1.0, continuous="processor"),
    *_rows("guidance_scale", "processor", 1.0, continuous=_LOGITS_ALONE),
    *_rows("stop_strings", "processor", continuous=_OTHER_END, job="row by row", **_OF_CONFIG),
    *_rows("watermarking_config", "processor", continuous="there are no watermarks"),
    *_rows("constraints force_words_ids", "constraints", continuous="there are no constraints"),
    *_rows("do_sample", "call", continuous="request", job="padded", **_OF_CONFIG),
    *_rows("penalty_alpha", "call", 0, continuous=_LOGITS_ALONE),
    *_rows("assistant_early_exit", "layers", continuous=_NO_DRAFTS),
    *_rows("dola_layers", "layers", continuous=_LOGITS_ALONE),
    *_rows("use_mtp", "layers", continuous=_NO_DRAFTS),
    *_rows("prompt_lookup_num_tokens", "drafting", continuous=_NO_DRAFTS, job="row by row"),
    *_rows("assistant_ensemble_weight", "drafting", continuous="ignored"),
    *_rows("speculation_type", "drafting", continuous=_NO_DRAFTS),
    *_rows("num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
           "max_matching_ngram_size", "drafts", batch="ignores", continuous="ignored"),
    *_rows("output_scores output_logits output_attentions output_hidden_states", "call",
           continuous="a result has tokens, and may have logprobs"),
    *_rows("return_dict_in_generate", "call", continuous="ignored", job="refused"),
    *_rows("token_healing", "call", continuous="a request begins with its prompt as it is"),
    *_rows("continuous_batching_config", "call", continuous="it is an argument of its own"),
    *_rows("use_cache transformers_version", "call", None, None, "ignores", "ignored", "padded"),
    *_rows("assistant_lookbehind target_lookbehind disable_compile", "call", batch="ignores",
           continuous="ignored"),
    *_rows("compile_config", "call", batch="ignores", continuous="request"),
    *_rows("cache_implementation", "call", continuous="ignored", job="padded"),
    *_rows("cache_config max_cache_len low_memory prefill_chunk_size is_assistant "
           "_from_model_config", "call", continuous="ignored"),
)  # fmt: skip
NEUTRAL: dict[str, Any] = {option.name: option.neutral for option in OPTIONS}


@functools.cache
def option_names(*effects: str, **columns: Any) -> tuple[str, ...]:
    """Return the names of the options of any of these effects whose other columns are such."""
    found = [each for each in OPTIONS if not effects or each.effect in effects]
    for column, value in columns.items():
        found = [each for each in found if getattr(each, column) == value]
    assert found, f"no option has {effects} and {columns}"
    return tuple(each.name for each in found)


FUSED = option_names("draws", job="padded")
"""The arguments of ``top_k_top_p_sample``, in the order in which it and transformers apply them."""
