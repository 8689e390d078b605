"""``Decoding.translate``: from lists of tokens to results, without ``generate()``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from lmdecode._checks import check_int, dtype_name, is_int, type_error
from lmdecode.beam.engine.request import BeamResult, check_tokens_of_request, token_rules_of_request
from lmdecode.decoder.searches import check_length
from lmdecode.decoder.translation import Translator
from lmdecode.integrations.transformers.beam.fused_processors import looks_back
from lmdecode.integrations.transformers.decoding.ctranslate2_rules import (
    acts_first_alone,
    with_defaults,
)
from lmdecode.integrations.transformers.decoding.requests import request_of_config
from lmdecode.integrations.transformers.generate_call import is_of_ctranslate2
from lmdecode.models.packed_stack import PackedDecoder

__all__ = ["translate"]

_OP = "Decoding.translate"
_MAX_BATCH_TOKENS = 4096
_NORM = "renormalize_logits"
_KEPT = 8  # translators of a decoder


def _tokens(name: str, source: Any) -> list[int]:
    if type(source) is list and set(map(type, source)) <= {int}:
        return source
    if isinstance(source, Tensor):
        if source.dim() != 1 or source.is_floating_point() or source.is_complex():
            raise ValueError(
                f"{_OP}: {name} is a tensor of shape {list(source.shape)} and dtype "
                f"{dtype_name(source)}; expected [length] of integers"
            )
        source = source.tolist()
    if not isinstance(source, Sequence) or isinstance(source, (str, bytes)):
        raise type_error(_OP, name, source, "a sequence of int")
    for token in source:
        if not is_int(token):
            raise type_error(_OP, f"a token of {name}", token, "an int")
    return [int(token) for token in source]


def _sources(sources: Any, attention_mask: Any) -> list[list[int]]:
    if isinstance(sources, Tensor):
        if sources.dim() != 2:
            raise ValueError(
                f"{_OP}: sources has shape {list(sources.shape)}; expected [batch, length]"
            )
        if attention_mask is None:
            return [_tokens(f"sources[{i}]", row) for i, row in enumerate(sources)]
        if not isinstance(attention_mask, Tensor):
            raise type_error(_OP, "attention_mask", attention_mask, "a tensor")
        if attention_mask.shape != sources.shape:
            raise ValueError(
                f"{_OP}: attention_mask has shape {list(attention_mask.shape)}; expected "
                f"{list(sources.shape)}, that of sources"
            )
        seen = attention_mask != 0
        return [
            _tokens(f"sources[{i}]", row[mask])
            for i, (row, mask) in enumerate(zip(sources, seen, strict=True))
        ]
    if attention_mask is not None:
        raise ValueError(f"{_OP}: attention_mask is given; expected None with lists of tokens")
    if not isinstance(sources, Sequence) or isinstance(sources, (str, bytes)):
        raise type_error(_OP, "sources", sources, "a sequence of sequences of int, or a tensor")
    return [_tokens(f"sources[{i}]", source) for i, source in enumerate(sources)]


def _config(generation_config: Any, arguments: dict[str, Any]) -> Any:
    given = {name: value for name, value in arguments.items() if value is not None}
    config = copy.deepcopy(generation_config)
    if config is None:
        config = GenerationConfig()
    unknown = config.update(**given)
    if unknown:
        raise ValueError(f"{_OP}: {next(iter(unknown))} is given; expected generate's arguments")
    return config


def _key(*parts: Any) -> bytes | None:
    """Return bytes that are equal only for equal parts; None if a part cannot be pickled."""
    try:
        return pickle.dumps(parts)
    except Exception:  # objects of the caller may raise anything
        return None


def _translator(
    decoding: Any, decoder: PackedDecoder, generation_config: Any, arguments: dict[str, Any]
) -> Translator:
    """Return the translator for these settings, reusing an earlier call's."""
    model = decoding.model
    configs = [generation_config, model.generation_config]
    key = _key(arguments, [None if config is None else vars(config) for config in configs])
    if key is not None and (kept := decoder.translators.get(key)) is not None:
        return kept
    config = _config(generation_config, arguments)
    request = request_of_config(None, config, model)
    has_beams, renormalizes = request.num_beams > 1, is_of_ctranslate2(model)
    if renormalizes and (renormalizes := bool(with_defaults(model, vars(config))[_NORM])):
        rules = token_rules_of_request(request, decoder.config.vocab_size)
        fits = acts_first_alone(rules, len(request.prompt_ids))
        if looks_back(rules) or (has_beams and not fits):
            raise ValueError(
                f"{_OP}: a penalty, n-grams, or bans behind the first token with beams are given; "
                "expected none, as Decoding.generate has CTranslate2's rules for them, or "
                f"{_NORM}=False for those of transformers"
            )
    check_length(_OP, "max_length", request.max_length, decoder)
    check_tokens_of_request(_OP, request, decoder.config.vocab_size)
    translator = Translator(decoder, request, renormalizes and has_beams)
    if key is not None:
        if len(decoder.translators) >= _KEPT:
            decoder.translators.clear()
        decoder.translators[key] = translator
    return translator


def translate(
    decoding: Any,
    sources: Any,
    *,
    attention_mask: Any,
    max_batch_tokens: int | None,
    generation_config: Any,
    **arguments: Any,
) -> list[BeamResult]:
    """See ``Decoding.translate``."""
    decoder, encoder = decoding.decoder, decoding.encoder
    if not isinstance(decoder, PackedDecoder) or encoder is None:
        raise ValueError(
            f"{_OP}: the model is not an encoder-decoder one of transformers on the cpu; expected "
            "Decoding.from_pretrained of such a model"
        )
    if not encoder.takes_tokens:
        raise ValueError(f"{_OP}: the model takes input_features; expected a model of tokens")
    most = _MAX_BATCH_TOKENS
    if max_batch_tokens is not None:
        most = check_int(_OP, "max_batch_tokens", max_batch_tokens, 1, limits="at least 1")
    found = [encoder.whole_source(source) for source in _sources(sources, attention_mask)]
    for i, source in enumerate(found):
        encoder.check_source(f"{_OP}: sources[{i}]", source)
    translator = _translator(decoding, decoder, generation_config, arguments)

    def encode(numbers: list[int]) -> tuple[Tensor, Tensor]:
        memory: tuple[Tensor, Tensor] = encoder.memories([found[number] for number in numbers])
        return memory

    with torch.no_grad():
        return translator.translate(encode, [len(source) for source in found], most)
