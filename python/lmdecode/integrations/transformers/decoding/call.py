"""``Decoding.generate``: the model's own ``generate()`` with a loop, and an encoder, in C++."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from lmdecode._checks import type_error
from lmdecode.decoder.causal_weights import PackedCausalModel
from lmdecode.decoder.weights import PackedDecoder
from lmdecode.integrations.transformers.decoding.causal_generation import decode_causal
from lmdecode.integrations.transformers.decoding.encoding import with_encoder
from lmdecode.integrations.transformers.decoding.generation import decode
from lmdecode.integrations.transformers.decoding.prompt_logits import PromptLogits
from lmdecode.integrations.transformers.decoding.refused import refuse_inner_outputs
from lmdecode.integrations.transformers.decoding.whisper import CallEncoder

__all__ = ["call_generate"]


def _causal_loop(decoding: Any, packed: PackedCausalModel, stored: Any) -> Callable[..., Any]:
    """Return the loop that ``generate()`` calls; it reads names of arguments off it."""
    new_runner = None if stored is None else stored.new_model
    return partial(decode_causal, new_runner, packed, decoding.cache_dtype)


def _decoder_loop(decoder: Any, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Return the loop of an encoder-decoder model; arguments are those of ``generate()``."""
    if arguments.get("streamer") is not None:  # before generate() gives it the prompt
        raise ValueError(
            "Decoding.generate: streamer is given; expected none, tokens stay in C++ until the "
            "search has ended"
        )
    if arguments.get("assistant_model") is not None:  # before generate() changes its config
        raise ValueError("assistant_model: expected None, Decoding runs the model itself")
    if arguments.get("return_token_timestamps"):  # before generate() asks for attentions itself
        refuse_inner_outputs(SimpleNamespace(**arguments))
        refuse_inner_outputs(arguments.get("generation_config"))
    if isinstance(arguments.get("encoder_outputs"), dict):
        # generate() writes the outputs of the beams to it.
        arguments["encoder_outputs"] = copy.copy(arguments["encoder_outputs"])
    return partial(decode, decoder, tokenizer=arguments.get("tokenizer"))


def _check_sources(model: Any, arguments: dict[str, Any], inputs: Any) -> None:
    """Raise for tokens that no encoder reads: transformers would say so of something else."""
    name = "inputs" if inputs is not None else "input_ids"
    tokens = arguments.get(name) if inputs is None else inputs
    if tokens is None or model.main_input_name != "input_ids":
        return
    if not isinstance(tokens, Tensor):
        raise type_error("Decoding.generate", name, tokens, "a tensor [B, S]")
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"Decoding.generate: {name} has shape {list(tokens.shape)}; expected [B, S], S at "
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
    if isinstance(decoding.decoder, PackedCausalModel):
        loop = _causal_loop(decoding, decoding.decoder, stored)
    else:
        _check_sources(decoding.model, arguments, inputs)
        loop = _decoder_loop(decoding.decoder, arguments)
    # A cache is of no use here, and a good part of a small model's call to prepare.
    config = arguments.get("generation_config")
    if config is None:
        arguments["use_cache"] = False
    else:  # beside which generate() does not want arguments
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.use_cache = False
        arguments.pop("use_cache", None)
    model = decoding.model
    if decoding.encoder is not None:
        encoder: Any = decoding.encoder
        is_whisper = hasattr(model, "detect_language")  # which runs the model
        if is_whisper:
            encoder = CallEncoder(encoder)
        model = with_encoder(model, encoder)
        if is_whisper and isinstance(decoding.decoder, PackedDecoder):
            model.forward = PromptLogits(type(model), encoder, decoding.decoder)
    generate = model.generate
    if isinstance(getattr(generate, "__self__", None), type(decoding)):  # put there by the caller
        generate = partial(type(model).generate, model)
    positional = () if inputs is None else (inputs,)
    run = partial(generate, *positional, custom_generate=loop, **arguments)
    return run() if stored is None else stored.run(run)
