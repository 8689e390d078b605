"""Tokenizers that a folder has in an old form, as the files that the package tokenizers reads.

Of a model of sentencepiece, transformers takes the pieces, and the rules of a class: letters that
no piece has become the end of a text, a first space is put or taken away, and normalisation is
lost.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmdecode._checks import install_hint

__all__ = ["converted_tokenizer", "keep_rules", "scored_merges"]

_UNIGRAM, _BPE = 1, 2
_NORMAL, _USER_DEFINED, _UNUSED, _BYTE = 1, 4, 5, 6
_SPACE = "\u2581"


def converted_tokenizer(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return ``tokenizer.json`` and the files that belong to it, by name, made by transformers.

    ``folder`` has a sentencepiece tokenizer, or a vocabulary with merges. Raises ImportError
    without transformers, or a package that it needs for this tokenizer; and ValueError if
    transformers cannot read it, has only a slow form of it, or it has a rule that
    ``tokenizer.json`` cannot keep.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import is_protobuf_available, is_sentencepiece_available
    except ImportError as error:
        raise ImportError(
            f"the tokenizer in {folder} needs transformers: {install_hint('transformers')}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:  # of the packages, too, that read the files
        can_read = is_protobuf_available() and is_sentencepiece_available()
        if not can_read and any(map(_is_sentencepiece, Path(folder).glob("*.model"))):
            raise ImportError(
                f"the tokenizer in {folder} is of sentencepiece: transformers needs the packages "
                "sentencepiece and protobuf to read it (pip install sentencepiece protobuf)"
            ) from error
        what = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder} has a tokenizer that cannot be read ({what})") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"{folder} has a {type(tokenizer).__name__}, which transformers has in Python alone; "
            "expected one that can be written as tokenizer.json"
        )
    with tempfile.TemporaryDirectory() as own:
        tokenizer.save_pretrained(own)
        files = {file.name: file.read_bytes() for file in Path(own).iterdir() if file.is_file()}
    sources = [Path(getattr(tokenizer, "vocab_file", None) or ""), *Path(folder).glob("*.model")]
    source = next(filter(_is_sentencepiece, sources), None)
    if source is not None:
        inner, settings = tokenizer.backend_tokenizer, json.loads(files["tokenizer_config.json"])
        words = keep_rules(inner, source, tokenizer.unk_token)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # whose rules are the file's
        extra = settings.get("extra_special_tokens")  # transformers puts words of the user there
        if isinstance(extra, list):
            settings["extra_special_tokens"] = [one for one in extra if one not in words]
        data = json.loads(inner.to_str())
        for token in data["added_tokens"]:
            token["normalized"] |= token["content"] in words
        files["tokenizer.json"] = json.dumps(data, ensure_ascii=False).encode()
        files["tokenizer_config.json"] = json.dumps(settings, ensure_ascii=False).encode()
    return files


def _is_sentencepiece(file: Path) -> bool:
    """Return whether a file begins with a piece, not with the base64 of tiktoken's files."""
    if not file.is_file():
        return False
    with file.open("rb") as begin:
        return begin.read(1) == b"\n"


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of a message of Protocol Buffers."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 64, 7):
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("it has a number of more than 64 bits")

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        at += size
        if at > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[at - size : at]


def keep_rules(tokenizer: Any, path: Path, unknown: str | None) -> list[str]:
    """Give a tokenizer the rules of a file; its tokens, and those added to a text, stay.

    ``unknown`` is the token for letters that no piece has. Return the words of the user, which are
    tokens wherever a normalised text has them, and no special ones. Raise ValueError for a file
    that is no model or has a rule that the package tokenizers cannot keep, and where a piece is
    missing.
    """
    try:
        parts: dict[int, list[bytes]] = {}
        for number, value in _fields(path.read_bytes()):
            parts.setdefault(number, []).append(value)
        trainer, rules, back = (dict(_fields(b"".join(parts.get(n, ())))) for n in (2, 3, 5))
        # Text, score, kind.
        fields = [{2: b"\0\0\0\0", 3: _NORMAL, **dict(_fields(data))} for data in parts[1]]
        pieces = [(piece[1].decode(), *struct.unpack("<f", piece[2]), piece[3]) for piece in fields]
    except (AttributeError, LookupError, struct.error, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no model of sentencepiece ({error!r})") from None
    words = [text for text, _, kind in pieces if kind == _USER_DEFINED]
    letters = rules.get(2, b"")
    for is_so, what in (
        (trainer.get(3, _UNIGRAM) not in (_UNIGRAM, _BPE), "is neither of kind unigram nor BPE"),
        (trainer.get(24), "has spaces behind words (treat_whitespace_as_suffix)"),
        (not rules.get(5, 1), "has spaces as they are (escape_whitespaces)"),
        (back.get(2), "changes texts that were decoded (denormalizer_spec)"),
        (any(kind == _UNUSED for *_, kind in pieces), "has unused pieces"),
        (letters and rules.get(1) == b"user_defined", "has rules of its own for letters"),
    ):
        if is_so:
            raise ValueError(f"{path} {what}, which is not read; expected a tokenizer.json")
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    needed = [text for text, _, kind in pieces if kind in (_NORMAL, _USER_DEFINED, _BYTE)]
    missing = [repr(text) for text in needed if text not in vocab]
    missing += [] if unknown in vocab else ["a token for unknown letters"]
    if missing:
        raise ValueError(f"{path}: transformers makes a tokenizer without {missing[0]}")
    scores = {text: score for text, score, kind in pieces if kind == _NORMAL}
    _set_rules(tokenizer, scores, unknown, rules, is_bpe=trainer.get(3) == _BPE,
               has_bytes=bool(trainer.get(35)))  # fmt: skip
    for word in words:
        if tokenizer.normalizer.normalize_str(word) != word.replace(" ", _SPACE):
            raise ValueError(
                f"{path} has a user-defined piece {word!r}, which its rules for letters or spaces "
                "change; expected a tokenizer.json"
            )
    return words


def scored_merges(scores: dict[str, float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make one with a score, best score first."""
    texts = sorted(scores, key=scores.__getitem__, reverse=True)
    cuts = [(text[:i], text[i:]) for text in texts for i in range(1, len(text))]
    return [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]


def _set_rules(
    tokenizer: Any, scores: dict[str, float], unknown: str | None, rules: dict[int, Any],
    *, is_bpe: bool, has_bytes: bool,
) -> None:  # fmt: skip
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    spaces = str(tokenizer.pre_tokenizer)  # of a class
    has_prefix = bool(rules.get(3, 1)) and 'prepend_scheme="never"' not in spaces
    scheme = "always" if 'prepend_scheme="always"' in spaces else "first"
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if is_bpe:
        merges = scored_merges(scores, vocab)
        tokenizer.model = models.BPE(
            vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes
        )
    else:
        least = min(scores.values(), default=0.0)
        size = tokenizer.get_vocab_size(with_added_tokens=False)
        texts = [tokenizer.model.id_to_token(i) for i in range(size)]
        tokenizer.model = models.Unigram(
            [(text, scores.get(text, least)) for text in texts], vocab[unknown], has_bytes
        )
    # tokenizers applies the rules of one letter, not the rules of a letter with its accents.
    accents = [normalizers.NFC()] if b"nfkc" in rules.get(1, b"") else []
    of_letters = [*accents, normalizers.Precompiled(rules[2]), *accents] if rules.get(2) else []
    trims = bool(rules.get(4, 1))
    before = [normalizers.Replace(Regex(" {2,}"), " ")] if trims else []
    before += [normalizers.Replace(Regex(r"\A +"), "")] if trims and not has_prefix else []
    behind = [normalizers.Replace(Regex(rf"{_SPACE}+\z"), "")] if trims else []
    tokenizer.normalizer = normalizers.Sequence(
        [*of_letters, *before, normalizers.Replace(" ", _SPACE), *behind]
    )
    # The first of two puts a space before a text that has one, the second makes it a letter. Where
    # spaces are removed, that one is the prefix.
    scheme = scheme if has_prefix else "never"
    links = [(_SPACE, scheme)] if trims else [(" ", scheme), (_SPACE, "never")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(space, of, split=False) for space, of in links]
    )
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
