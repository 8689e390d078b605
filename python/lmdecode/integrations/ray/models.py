"""The models that actors and replicas load: folders, packed or of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmdecode._checks import type_error
from lmdecode.decoding import Decoding
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.saved import MANIFEST

__all__ = ["CAPACITY", "check_is_causal", "load_model", "load_tokenizer", "positions_of"]

CAPACITY = 8192  # tokens of a text on an engine, if the model has no fewer positions


def load_model(op: str, model: Any, dtype: str | None) -> Decoding:
    """Return the model of a folder, or the given ``Decoding``.

    A folder that ``Decoding.save`` wrote is mapped, so that processes of a node share it. A folder
    or name of a transformers model is packed with ``dtype``, by default float32. Raises TypeError
    for another ``model``; ValueError for ``dtype`` with a packed model or where no configs have it;
    OSError where there is no such model. Errors name ``op``.
    """
    if isinstance(model, Decoding):
        is_packed, found = True, model
    elif not isinstance(model, (str, os.PathLike)):
        raise type_error(op, "model", model, "a folder, the name of a model, or a Decoding")
    else:
        is_packed = (Path(model) / MANIFEST).is_file()
        if is_packed:
            found = Decoding.load(model)
        else:
            found = Decoding.from_pretrained(model, dtype or "float32", keep_model=False)
    if is_packed and dtype is not None:
        raise ValueError(f"{op}: dtype is {dtype!r}; expected None for a model that is packed")
    if found.model is None:
        raise ValueError(f"{op}: model has no config.json; expected that of a transformers model")
    return found


def check_is_causal(op: str, decoding: Decoding) -> PackedCausalModel:
    """Return the decoder of a decoder-only model; raise ValueError for another one."""
    if not isinstance(decoding.decoder, PackedCausalModel):
        kind = decoding.model.config.model_type
        raise ValueError(
            f"{op}: model is a {kind!r}, an encoder-decoder model; expected a decoder-only one"
        )
    return decoding.decoder


def positions_of(decoding: Decoding) -> int:
    """Return the most tokens of a text that a model takes; ``CAPACITY`` where it sets no limit."""
    config = decoding.model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", CAPACITY))


def load_tokenizer(op: str, tokenizer: Any, model: Any, *, is_processor: bool = False) -> Any:
    """Return the tokenizer, or the processor of speech, of a folder or a name.

    Parameters
    ----------
    op
        Who asks, for errors.
    tokenizer
        A folder, a name or the object itself; None: of the model's folder.
    model
        The model's folder or name, or a ``Decoding``.
    is_processor
        Whether a feature extractor is wanted, too.

    Raises
    ------
    TypeError
        There is none, and ``model`` is no folder that could have one.
    OSError
        The folder has none.
    """
    from transformers import AutoProcessor, AutoTokenizer

    if tokenizer is None:
        tokenizer = model
    if isinstance(tokenizer, Decoding):
        raise TypeError(
            f"{op}: tokenizer is None beside a Decoding; expected a folder, a name or an object"
        )
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    return (AutoProcessor if is_processor else AutoTokenizer).from_pretrained(tokenizer)
