"""Tokenizers and feature extractors of transformers, for folders of CTranslate2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmdecode.formats.ctranslate2.folder import MODEL, read_json
from lmdecode.formats.ctranslate2.model_file import ModelFile

__all__ = ["load_feature_extractor", "load_tokenizer"]


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """Return the tokenizer of a folder's ``tokenizer.json``, as transformers has it.

    Of a Whisper it is a ``WhisperTokenizer``, which knows of languages and timestamps. For folders
    with vocabularies alone there is ``load_vocabulary``, to be used with what cut the words: their
    ``sentencepiece`` files, mostly.

    Raises
    ------
    FileNotFoundError
        There is no ``tokenizer.json``.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, WhisperTokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json; expected one, or load_vocabulary for its tokens alone"
        )
    if ModelFile(Path(folder) / MODEL).spec == "WhisperSpec":
        special = (f"{name}_token" for name in ("bos", "eos", "pad", "unk"))
        return WhisperTokenizer.from_pretrained(folder, **dict.fromkeys(special, "<|endoftext|>"))
    if (Path(folder) / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(folder)
    settings = Path(folder) / "config.json"
    known = read_json(settings, dict) if settings.is_file() else {}
    special = {name: known.get(name) for name in ("bos_token", "eos_token", "unk_token")}
    special = {name: token for name, token in special.items() if token}
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **special)


def load_feature_extractor(folder: str | os.PathLike[str]) -> Any:
    """Return what makes features of a Whisper's sound: as transformers has it.

    Of ``preprocessor_config.json`` where there is one; else Whisper's own numbers, with as many mel
    bins as the model's first convolution takes.

    Raises
    ------
    ValueError
        The folder's model is no Whisper.
    """
    from transformers import WhisperFeatureExtractor

    path = Path(folder)
    file = ModelFile(path / MODEL)
    if file.spec != "WhisperSpec":
        raise ValueError(
            f"load_feature_extractor: {folder} is a {file.spec!r}; expected 'WhisperSpec'"
        )
    if (path / "preprocessor_config.json").is_file():
        return WhisperFeatureExtractor.from_pretrained(path)
    seconds = file.shape("encoder/position_encodings/encodings")[0] // 50
    bins = file.shape("encoder/conv1/weight")[1]
    return WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)
