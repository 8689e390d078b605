"""Options of a ``GenerationConfig``: what requests of continuous batching do with each."""

from __future__ import annotations

import copy
from typing import Any

OF_REQUESTS = (
    "max_new_tokens max_length eos_token_id do_sample num_return_sequences compile_config"
).split()
# Processors of ``generate()``, which are called or fused.
OF_PROCESSORS = (
    "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty "
    "no_repeat_ngram_size encoder_repetition_penalty encoder_no_repeat_ngram_size bad_words_ids "
    "min_length min_new_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "renormalize_logits exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "sequence_bias"
).split()
# Of padding, other caches, searches and drafts that others ask for, and the form of a result.
WITHOUT_EFFECT = (
    "pad_token_id bos_token_id decoder_start_token_id use_cache cache_config cache_implementation "
    "max_cache_len low_memory prefill_chunk_size length_penalty early_stopping diversity_penalty "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_lookbehind target_lookbehind assistant_ensemble_weight max_matching_ngram_size "
    "is_assistant disable_compile return_dict_in_generate transformers_version _from_model_config"
).split()
REFUSED = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), "a request is one text"),
    **dict.fromkeys(("constraints", "force_words_ids"), "there are no constraints"),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "guidance_scale"),
                    "tokens come of the model's logits alone"),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type",
                     "use_mtp"), "there are no drafts"),
    **dict.fromkeys(("stop_strings", "max_time"),
                    "a request ends by eos_token_id and max_new_tokens"),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions",
                     "output_hidden_states"), "a result has tokens, and may have logprobs"),
    "token_healing": "a request begins with its prompt as it is",
    "watermarking_config": "there are no watermarks",
    "continuous_batching_config": "it is an argument of its own",
}  # fmt: skip
_NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "guidance_scale": 1, "penalty_alpha": 0}


def checked_config(call: str, config: Any) -> Any:
    """Return a copy of a config, without options that continuous batching cannot have.

    Attributes that are none of transformers' own are left aside, as by ``generate()``. An option
    that is set and cannot be had, or is not in the lists above, is a ValueError.
    """
    names = vars(type(config)()).keys() - {*OF_REQUESTS, *OF_PROCESSORS, *WITHOUT_EFFECT}
    for name in sorted(names):
        value = getattr(config, name, None)
        if value is not None and value is not False and value != _NEUTRAL.get(name):
            reason = REFUSED.get(name, "continuous batching does not know it")
            raise ValueError(f"{call}: {name} is {value!r:.80}; expected none: {reason}")
    return copy.copy(config)
