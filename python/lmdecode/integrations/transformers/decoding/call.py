"""``Decoding.generate``: the model's own ``generate()`` with a loop, and an encoder, in C++."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmdecode._checks import dtype_name, type_error
from lmdecode.decoder.decoding import PackedDecoding
from lmdecode.decoder.engine.drafts import Drafting, PromptLookup
from lmdecode.decoder.engine.model_drafts import drafting_of
from lmdecode.generation_options import option_names
from lmdecode.integrations.transformers.decoding.causal_generation import (
    CausalCall,
    EngineCall,
    decode_causal,
    engine_call,
)
from lmdecode.integrations.transformers.decoding.ctranslate2_rules import with_defaults, with_rules
from lmdecode.integrations.transformers.decoding.encoder_decoder_generation import (
    decode_encoder_decoder,
)
from lmdecode.integrations.transformers.decoding.encoding import with_encoder
from lmdecode.integrations.transformers.decoding.whisper import (
    CallEncoder,
    CallSounds,
    PromptLogits,
)
from lmdecode.integrations.transformers.generate_call import (
    behind_prompt,
    check_tries,
    ending,
    is_of_ctranslate2,
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
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedDecoder

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

__all__ = ["call_generate", "causal_call", "engine_call_of"]

_OP = "Decoding.generate"
# Arguments of models that read more than text.
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


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
            config, lookup = generation_config, None
            if getattr(config, "prompt_lookup_num_tokens", None) is not None:
                config, lookup = lookup_of(config, _OP)
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
            if is_of_ctranslate2(model) and not constraints and not force_words_ids:
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


# --- Calls of both kinds of models ----------------------------------------------------------------


def _check_decoder_arguments(arguments: dict[str, Any]) -> None:
    """Raise for arguments that no encoder-decoder model supports, before any change."""
    refuse_past(arguments)
    if arguments.get("streamer") is not None:  # before generate() passes it the prompt
        raise ValueError(
            "Decoding.generate: streamer is given; expected none, tokens stay in C++ until the "
            "search has ended"
        )
    if arguments.get("assistant_model") is not None:  # before generate() changes its config
        raise ValueError("assistant_model: expected None, Decoding runs the model itself")
    if arguments.get("return_token_timestamps"):  # before generate() requests attentions itself
        refuse_inner_outputs(SimpleNamespace(**arguments))
        refuse_inner_outputs(arguments.get("generation_config"))
    if isinstance(arguments.get("encoder_outputs"), dict):
        # generate() writes the outputs of the beams to it.
        arguments["encoder_outputs"] = copy.copy(arguments["encoder_outputs"])


def _check_inputs(model: Any, arguments: dict[str, Any], inputs: Any) -> None:
    """Raise for inputs that no model reads; transformers' error would name another argument."""
    main = model.main_input_name
    name = "inputs" if inputs is not None else main
    found, takes_tokens = arguments.get(name) if inputs is None else inputs, main == "input_ids"
    if found is None:
        return
    if not isinstance(found, Tensor):
        shape = "[B, S]" if takes_tokens else "[B, channels, frames]"
        raise type_error("Decoding.generate", name, found, f"a tensor {shape}")
    least = 1 if model.config.is_encoder_decoder else 0  # causal_call checks the others
    if takes_tokens and (found.dim() != 2 or found.shape[1] < least):
        raise ValueError(
            f"Decoding.generate: {name} has shape {list(found.shape)}; expected [B, S], S at "
            "least 1"
        )


def call_generate(
    decoding: Any,
    inputs: Tensor | None,
    store: Any,
    session: str | None,
    arguments: dict[str, Any],
    *,
    append: bool = False,
    rewind: bool = False,
) -> Any:
    """See ``Decoding.generate``; arguments are changed."""
    if decoding.model is None:
        raise ValueError(
            "Decoding.generate: there is no model; expected one, by Decoding.from_pretrained"
        )
    if "custom_generate" in arguments:
        raise ValueError(
            "Decoding.generate: custom_generate is given; expected none, the loop is Decoding's"
        )
    _check_inputs(decoding.model, arguments, inputs)
    assistant_model = None
    if isinstance(decoding.decoder, PackedCausalModel):
        # transformers would take it for a model of its own.
        assistant_model = arguments.pop("assistant_model", None)
    stored: Any = None
    if store is not None or session is not None:
        from lmdecode.integrations.transformers.decoding.causal_store import (
            StoredCall,
            with_session,
        )

        if append:
            inputs = with_session(decoding, store, session, inputs, arguments)
        stored = StoredCall(decoding, store, session, inputs, arguments, rewind)
    elif append or rewind:
        raise ValueError(
            "Decoding.generate: append or rewind is True; expected a store and a session with it"
        )
    packed, model = decoding.decoder, decoding.model
    if not isinstance(packed, PackedCausalModel):
        _check_decoder_arguments(arguments)
    arguments = _prepared(model, arguments)
    if isinstance(packed, PackedCausalModel):
        if getattr(model, "_is_stateful", False):  # with drafts transformers refuses such models
            model = copy.copy(model)
            model._is_stateful = False
        generate = _generate_of(decoding, model, inputs)

        def run() -> Any:
            call = causal_call(packed, generate, arguments, assistant_model)
            return decode_causal(decoding, call, stored)

        return run() if stored is None else stored.run(run)
    is_whisper = hasattr(model, "detect_language")  # which runs the model
    if decoding.encoder is not None:
        encoder: Any = decoding.encoder
        if is_whisper:
            encoder = CallEncoder(encoder)
        elif encoder.whole_source([]) and arguments.get("encoder_outputs") is None:
            ids = arguments.pop("input_ids", None) if inputs is None else inputs
            if ids is not None:
                mask = arguments.get("attention_mask")
                inputs, arguments["attention_mask"] = encoder.whole_sources(ids, mask)
        model = with_encoder(model, encoder)
        if is_whisper and isinstance(packed, PackedDecoder):
            model.forward = PromptLogits(type(model), encoder, packed)
    elif is_whisper:
        model = copy.copy(model)  # of its own attributes
    sounds = CallSounds(model) if is_whisper else None
    loop = partial(decode_encoder_decoder, packed, sounds, tokenizer=arguments.get("tokenizer"))
    return _generate_of(decoding, model, inputs)(custom_generate=loop, **arguments)


def engine_call_of(
    decoding: Any, prompt: list[int], arguments: dict[str, Any]
) -> EngineCall | None:
    """Return the engine call of ``Decoding.generate(prompt, **arguments)``; a seed is ignored.

    It is the same for every prompt of this length. None if only ``generate()`` can run it. Raises
    as ``Decoding.generate``.
    """
    inputs = torch.tensor([prompt], device="cpu")
    arguments = {**arguments, "attention_mask": torch.ones_like(inputs)}
    arguments = _prepared(decoding.model, arguments)
    generate = _generate_of(decoding, decoding.model, inputs)
    call = causal_call(decoding.decoder, generate, arguments)
    fits = call.fits_engine and not call.has_beams and call.drafting is None
    return engine_call(decoding.decoder, call) if fits else None


def _prepared(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without a cache, and with defaults of CTranslate2 for a model of it."""
    arguments = _without_cache(arguments)
    return with_defaults(model, arguments) if is_of_ctranslate2(model) else arguments


def _without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with which ``generate()`` prepares no cache.

    The cache would be unused, and preparing it takes much of a small model's call.
    """
    config = arguments.get("generation_config")
    if config is None:
        return {**arguments, "use_cache": False}
    config = copy.deepcopy(config)  # with which generate() refuses arguments
    config.use_cache = False
    others = {name: value for name, value in arguments.items() if name != "use_cache"}
    return {**others, "generation_config": config}


def _generate_of(decoding: Any, model: Any, inputs: Tensor | None) -> Callable[..., Any]:
    """Return the ``generate()`` of a model's class, not one that a caller has set on it."""
    generate = model.generate
    if isinstance(getattr(generate, "__self__", None), type(decoding)):
        generate = partial(type(model).generate, model)
    return generate if inputs is None else partial(generate, inputs)
