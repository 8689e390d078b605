"""Tokenizers and feature extractors of transformers, for folders of CTranslate2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmdecode.readers.ctranslate2.folder import MODEL, read_json
from lmdecode.readers.ctranslate2.generation_config import END
from lmdecode.readers.ctranslate2.model_file import ModelFile

__all__ = ["load_feature_extractor", "load_tokenizer"]


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """Return the transformers tokenizer of a folder's ``tokenizer.json``.

    For a Whisper model it is a ``WhisperTokenizer``, with languages and timestamps. For folders
    with vocabularies only, use ``load_vocabulary`` with the model's own segmentation, mostly
    ``sentencepiece`` files.

    Raises
    ------
    FileNotFoundError
        There is no ``tokenizer.json``.
    ValueError
        It is not a tokenizer, or not a Whisper's.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, WhisperTokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json; expected one, or load_vocabulary for its tokens alone"
        )
    if ModelFile(Path(folder) / MODEL).spec == "WhisperSpec":
        names = [f"{name}_token" for name in ("bos", "eos", "pad", "unk")]
        special: dict[str, Any] = dict.fromkeys(names, END)
        special["extra_special_tokens"] = _special_tokens(path)
        return WhisperTokenizer.from_pretrained(folder, **special)
    if (Path(folder) / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(folder)
    settings = Path(folder) / "config.json"
    known = read_json(settings, dict) if settings.is_file() else {}
    names = [name for name in ("bos_token", "eos_token", "unk_token") if known.get(name)]
    special = {name: known[name] for name in names}
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **special)


def _special_tokens(path: Path) -> list[str]:
    """Return the special tokens that a Whisper's ``tokenizer.json`` adds to its words.

    Timestamps are those that follow the last of them.
    """
    try:
        added = [(token["id"], token["content"]) for token in read_json(path, dict)["added_tokens"]]
        numbers = {str(name): int(i) for i, name in added}
        last = numbers["<|notimestamps|>"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no tokenizer of a Whisper ({error!r})") from error
    return sorted((name for name, i in numbers.items() if i <= last), key=numbers.__getitem__)


def load_feature_extractor(folder: str | os.PathLike[str]) -> Any:
    """Return the ``WhisperFeatureExtractor`` of transformers for a Whisper model.

    It is made from ``preprocessor_config.json`` if that exists. Otherwise it has Whisper's own
    settings, with as many mel bins as the model's first convolution takes.

    Raises
    ------
    ValueError
        The model in the folder is not a Whisper model.
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
