"""Encoder-decoder models of transformers as CTranslate2 runs them."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

_LOADERS = {"marian": "MarianMTLoader", "m2m_100": "M2M100Loader", "whisper": "WhisperLoader"}


def _load(runner: type, spec: Any, compute_type: str) -> Any:
    """Return what runs a model in one thread."""
    spec.validate()
    spec.optimize(quantization=None if compute_type == "float32" else compute_type)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        return runner(
            str(Path(folder)),
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=1,
        )


def _spec(model: Any) -> Any:
    from ctranslate2.converters import transformers as converters

    loader = getattr(converters, _LOADERS[model.config.model_type])()
    # Of a copy: a specification has the model's own memory, and is rounded to int8 in place.
    return loader.get_model_spec(copy.deepcopy(model))


def translator(model: Any, compute_type: str) -> Any:
    """Return a ``ctranslate2.Translator`` of one thread, of whose tokens ``"7"`` is token 7.

    The last token of a Marian model's vocabulary must be its padding, whose embedding is 0:
    CTranslate2 has no such token, and begins with a zero embedding.
    """
    import ctranslate2

    spec, config = _spec(model), model.config
    size = config.vocab_size - (config.model_type == "marian")
    vocabulary = [str(token) for token in range(size)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    end = str(config.eos_token_id)
    spec.config.eos_token = spec.config.decoder_start_token = spec.config.bos_token = end
    spec.config.unk_token = "1"
    spec.config.add_source_eos = False
    return _load(ctranslate2.Translator, spec, compute_type)


def whisper(model: Any, compute_type: str, special: dict[str, int]) -> Any:
    """Return a ``ctranslate2.models.Whisper`` of one thread, of whose tokens some have names."""
    import ctranslate2

    spec = _spec(model)
    tokens = [str(token) for token in range(model.config.vocab_size)]
    for name, token in special.items():
        tokens[token] = name
    spec.register_vocabulary(tokens)
    spec.config.suppress_ids = spec.config.suppress_ids_begin = []
    spec.config.lang_ids, spec.config.alignment_heads = [special["<|en|>"]], [[0, 0]]
    return _load(ctranslate2.models.Whisper, spec, compute_type)
