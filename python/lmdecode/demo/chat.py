"""``demo chat``: ``lmdecode chat`` with the shipped model."""

from __future__ import annotations

import argparse
from pathlib import Path

from lmdecode.cli.chat import default_store, talk
from lmdecode.cli.errors import CommandError
from lmdecode.cli.options import capacity_of, sampling_of
from lmdecode.demo._model import load_tokenizer
from lmdecode.demo._output import DemoError, model_folder, one_line, readable_path, require
from lmdecode.serving.text_model import TextModel, is_causal

__all__ = ["default_store", "run"]


def _loaded(folder: Path, dtype: str | None) -> TextModel:
    try:
        model = TextModel.load(folder, dtype=dtype)
    except (OSError, ValueError) as error:
        _check_kind(folder)
        if not (folder / "lmdecode.json").is_file():
            load_tokenizer(folder)  # says what is wrong with it
        raise DemoError(one_line(error).replace("TextModel.load: dtype", "--dtype")) from error
    if not is_causal(model.decoding):
        raise DemoError(f"{folder} has an encoder-decoder model; expected a decoder-only one")
    return model


def _check_kind(folder: Path) -> None:
    """Raise DemoError where it is the model that cannot be loaded."""
    if (folder / "lmdecode.json").is_file():
        return
    require("transformers")
    from lmdecode.integrations.transformers.decoding.models import load_parts

    try:
        load_parts(folder)
    except (OSError, ValueError) as error:
        raise DemoError(one_line(error)) from error


def run(
    model_path: Path | None, store_path: Path | None, session: str, dtype: str | None, tokens: int
) -> None:
    """Talk until the end of the input.

    Parameters
    ----------
    model_path
        Folder of a causal language model and its tokenizer, or one that ``Decoding.save`` wrote;
        None: the model of the source tree.
    store_path
        Folder of talks; None: one in the user's cache.
    session
        Name of the talk.
    dtype
        Format of the weights; None: int8, or that of a saved model.
    tokens
        The most tokens of an answer.

    Raises
    ------
    DemoError
        Something is missing, or the model is one that ``Decoding`` does not run.
    """
    folder, path = model_folder(model_path), store_path or default_store()
    model = _loaded(folder, dtype)
    given = argparse.Namespace(
        context=None, temperature=None, top_p=None, top_k=None, min_p=None, seed=None, stop=[]
    )
    arguments = {**sampling_of(given, model), "max_new_tokens": tokens}
    try:
        talk(model, readable_path(folder), path, session, arguments,
             capacity=capacity_of(given, model))  # fmt: skip
    except (CommandError, OSError, ValueError) as error:
        raise DemoError(one_line(error)) from error
