"""``Decoding.generate``: the model's own ``generate()`` with a loop, and an encoder, in C++."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lmdecode._checks import type_error
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.integrations.transformers.decoding.causal_call import causal_call
from lmdecode.integrations.transformers.decoding.causal_generation import decode_causal
from lmdecode.integrations.transformers.decoding.ctranslate2_rules import with_defaults
from lmdecode.integrations.transformers.decoding.encoder_decoder_generation import (
    decode_encoder_decoder,
)
from lmdecode.integrations.transformers.decoding.encoding import with_encoder
from lmdecode.integrations.transformers.decoding.engine_call import EngineCall, engine_call
from lmdecode.integrations.transformers.decoding.whisper import (
    CallEncoder,
    CallSounds,
    PromptLogits,
)
from lmdecode.integrations.transformers.generate_call import refuse_inner_outputs, refuse_past

__all__ = ["call_generate", "engine_call_of"]


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
    arguments = with_defaults(model, _without_cache(arguments))
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
    arguments = _without_cache({**arguments, "attention_mask": torch.ones_like(inputs)})
    arguments = with_defaults(decoding.model, arguments)
    generate = _generate_of(decoding, decoding.model, inputs)
    call = causal_call(decoding.decoder, generate, arguments)
    fits = call.fits_engine and not call.has_beams and call.drafting is None
    return engine_call(decoding.decoder, call) if fits else None


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
