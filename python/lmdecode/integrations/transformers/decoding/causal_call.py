"""A checked call of a decoder-only model's ``generate()``, as transformers prepares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmdecode._checks import dtype_name
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.decoding import PackedDecoding
from lmdecode.decoder.engine.drafts import Drafting, PromptLookup
from lmdecode.decoder.engine.model_drafts import drafting_of
from lmdecode.generation_options import option_names
from lmdecode.integrations.transformers._prefix_tries import behind_prompt, check_tries
from lmdecode.integrations.transformers.decoding.ctranslate2_rules import with_rules
from lmdecode.integrations.transformers.generate_call import (
    ending,
    refuse_handed_on,
    refuse_inner_outputs,
    refuse_other_drafts,
    refuse_other_layers,
    refuse_other_modes,
    refuse_past,
    refuse_seed_of_beams,
    with_stop_strings,
)
from lmdecode.integrations.transformers.sampling.speculation import Lookup, lookup_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

__all__ = ["CausalCall", "causal_call"]

_OP = "Decoding.generate"
# Arguments of models that read more than text.
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


class CausalCall(NamedTuple):
    """Prepared arguments of a ``generate()`` call.

    ``input_ids`` and ``mask`` are [rows, S] int64 on the CPU, and 0 in the mask is padding on the
    left. ``device`` is the device of the caller's tokens and of the result. ``fits_engine`` is
    false if the call uses a feature that engines lack (streamers, constraints).
    """

    model: Any
    input_ids: Tensor
    mask: Tensor | None
    device: torch.device
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    drafting: Drafting | None
    streamer: Any
    seed: Any
    constraints: Any
    force_words_ids: Any
    has_beams: bool
    fits_engine: bool


def _first(rows: Tensor) -> int:
    """Return the index of the first true row of [rows]."""
    return int(rows.int().argmax())


def _some(numbers: Tensor) -> str:
    """Return the first of some numbers, [n]."""
    return f"{numbers[:8].tolist()}{' and more' if len(numbers) > 8 else ''}"


def _refuse(
    config: GenerationConfig,
    model: Any,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    sees_padding: bool,
) -> None:
    """Raise ValueError for arguments of ``generate()`` that are not supported here."""
    refuse_inner_outputs(config)
    # Outputs of encoders; there is no encoder.
    empty = {name for name, value in model_kwargs.items() if isinstance(value, dict) and not value}
    types = model_kwargs.get("token_type_ids")
    # Zeros from Gemma 3's processor mean text only; other models embed zeros, too.
    if types is not None and model.config.model_type == "gemma3" and not bool(types.any()):
        empty.add("token_type_ids")
    refuse_handed_on(model_kwargs, {"logits_to_keep", *empty}, "model")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected tokens, got shape {list(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids: expected integers, got dtype {dtype_name(input_ids)}")
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: expected shape {list(input_ids.shape)}, that of input_ids, got "
            f"{list(mask.shape)}"
        )
    seen = mask != 0
    if not bool(seen.any(dim=-1).all()):
        raise ValueError("attention_mask: expected a token in each row, one is padding alone")
    if not bool(seen[:, -1].all()):
        raise ValueError(
            "attention_mask: expected prompts that are padded on the left, as a tokenizer with "
            f'padding_side="left" does, got 0 for the last token of row {_first(~seen[:, -1])}'
        )
    within = seen[:, :-1] & ~seen[:, 1:]
    if sees_padding and bool(within.any()):
        raise ValueError(
            "attention_mask: expected padding on the left alone, got 0 behind 1 in row "
            f"{_first(within.any(-1))}: the windows and convolutions of transformers' layers count "
            "what is masked within a prompt, those of Decoding do not"
        )
    positions = model_kwargs.get("position_ids")
    if positions is None:
        return
    expected = "position_ids: expected None, or those of prompts that begin at 0"
    if positions.shape[-1] != seen.shape[-1]:
        raise ValueError(f"{expected}, {list(seen.shape)}, got shape {list(positions.shape)}")
    wrong = (positions != seen.cumsum(-1) - 1) & seen
    if bool(wrong.any()):
        row = _first(wrong.any(-1).flatten())
        got = positions.expand(wrong.shape).flatten(0, -2)[row]
        raise ValueError(f"{expected}, got {_some(got)} in row {row}")


def _check_length(packed: PackedCausalModel, config: GenerationConfig, mask: Tensor | None) -> None:
    """Raise ValueError if texts may become longer than the model supports."""
    most = packed.max_positions
    padding = 0 if mask is None else int((mask == 0).sum(dim=-1).min())
    if most is not None and config.max_length > padding + most + 1:
        raise ValueError(
            f"max_length: expected at most {padding + most + 1}, as the model has {most} "
            f"positions, got {config.max_length}"
        )


def _drafting(
    packed: PackedCausalModel,
    config: GenerationConfig,
    lookup: Lookup | None,
    assistant: Any,
    arguments: dict[str, Any],
) -> Drafting | None:
    """Return the drafts that a call asks for. The values of the assistant's config are defaults."""
    if assistant is None:
        return None if lookup is None else PromptLookup(*lookup)
    if lookup is not None:
        raise ValueError(
            f"prompt_lookup_num_tokens: expected None, an assistant_model drafts, got "
            f"{lookup.num_tokens}"
        )
    tokenizer, own = arguments.get("tokenizer"), arguments.get("assistant_tokenizer")
    has_same_tokens = own is not None and _have_same_tokens(tokenizer, own)
    refuse_other_drafts(config, None if has_same_tokens else own)
    # generate() has filled the gaps of its config with values of its own.
    given = arguments.get("generation_config")
    options: dict[str, Any] = {}
    for name in option_names("drafts"):
        options[name] = arguments.get(name)
        if options[name] is None:
            options[name] = getattr(given, name, None)
        if options[name] is None and isinstance(assistant, PackedDecoding):
            options[name] = assistant._generation_default(name)
    return drafting_of(
        _OP, packed, assistant_model=assistant, has_same_tokens=has_same_tokens, **options
    )


def _have_same_tokens(*tokenizers: Any) -> bool:
    """Tell whether two tokenizers of transformers have the same tokens."""
    first, second = (each.get_vocab() if hasattr(each, "get_vocab") else {} for each in tokenizers)
    return bool(first) and first == second


def causal_call(
    packed: PackedCausalModel,
    generate: Callable[..., Any],
    arguments: dict[str, Any],
    assistant_model: Any = None,
) -> CausalCall:
    """Let transformers prepare a call, and return it.

    ``generate`` is the method of the model, with its ``inputs`` bound; ``assistant_model`` a
    ``Decoding`` that drafts, or None. Raises ValueError that names an argument that is not
    supported.
    """
    refuse_past(arguments)  # before generate() looks into it
    for name in _MEDIA:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name}: expected None, as Decoding takes text alone, got "
                f"{type(arguments[name]).__name__}"
            )
    streamer, given_tokenizer = arguments.get("streamer"), arguments.get("tokenizer")

    # transformers passes on the arguments that this signature adds to its own loops'.
    def take(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: Any = None,
        stop_strings: str | list[str] | None = None,
        constraints: Any = None,
        force_words_ids: Any = None,
        **model_kwargs: Any,
    ) -> CausalCall:
        with ending(streamer):
            config, lookup = lookup_of(generation_config, _OP)
            refuse_other_layers(config, "Decoding runs the model itself")
            drafting = _drafting(packed, config, lookup, assistant_model, arguments)
            sees_padding = any(packed.cache_windows) or packed.state_size > 0
            _refuse(config, model, input_ids, model_kwargs, sees_padding)
            has_beams = bool((config.num_beams or 1) > 1 or constraints or force_words_ids)
            if has_beams:
                refuse_seed_of_beams(seed)
            if has_beams and lookup is not None:
                raise ValueError(
                    f"prompt_lookup_num_tokens: expected None with beams, got {lookup.num_tokens}"
                )
            if has_beams and assistant_model is not None:
                raise ValueError("assistant_model: expected None with beams")
            if has_beams and streamer is not None:
                raise ValueError(
                    "streamer: expected None for beam search, whose tokens are not final"
                )
            if not has_beams:
                refuse_other_modes(config)
            mask = model_kwargs.get("attention_mask")
            _check_length(packed, config, mask)
            processors = behind_prompt(logits_processor, input_ids.shape[1])
            if not constraints and not force_words_ids:
                processors = with_rules(model, config, processors, input_ids, mask)
            check_tries(processors, model.config.get_text_config(decoder=True).vocab_size)
            others = (
                streamer, constraints, force_words_ids,
                getattr(config, "constraints", None), getattr(config, "force_words_ids", None),
            )  # fmt: skip
            return CausalCall(
                model,
                input_ids.to("cpu", torch.int64),
                mask,
                input_ids.device,
                processors,
                with_stop_strings(stopping_criteria, stop_strings, given_tokenizer),
                config,
                drafting,
                streamer,
                seed,
                constraints,
                force_words_ids,
                has_beams,
                all(asked is None for asked in others),
            )

    call: CausalCall = generate(custom_generate=take, **arguments)
    return call
