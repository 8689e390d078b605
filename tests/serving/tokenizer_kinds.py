"""Small tokenizers of every kind of decoder that models have."""

import functools
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
decoders, models, normalizers = tokenizers.decoders, tokenizers.models, tokenizers.normalizers
pre_tokenizers = tokenizers.pre_tokenizers

__all__ = ["KINDS", "KJV", "tokenizer_of"]

KJV = Path(__file__).resolve().parents[2] / "examples" / "kjv_mistral" / "model"
SPACE = "\u2581"
WORDS = ["a", "b", "he", "llo", " ", ".", ",", "n't", "'", "'s", "!", "?", "\u00e9", "\U0001f600"]


def _add(tokenizer: Any) -> Any:
    added = tokenizers.AddedToken
    tokenizer.add_special_tokens([added("<s>"), added("</s>"), added("<|im_end|>")])
    tokenizer.add_tokens([added("<think>", normalized=False), added(f"{SPACE}added")])
    return tokenizer


def _bpe(vocabulary: list[str], **options: Any) -> Any:
    return tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, [], **options))


def _byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _bpe([*alphabet, "\u0120a", "he", "\u00e2\u0124", "\u4e2d"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(strips: bool = True) -> Any:
    pieces = [SPACE, f"{SPACE}{SPACE}", f"{SPACE}a", *WORDS]
    tokenizer = _bpe(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *pieces], byte_fallback=True,
                     unk_token="<unk>", fuse_unk=True)  # fmt: skip
    prefix = [normalizers.Prepend(SPACE)] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _metaspace(scheme: str = "always") -> Any:
    pieces = ["<unk>", SPACE, f"{SPACE}{SPACE}a", f"{SPACE}he", f"b{SPACE}", *WORDS]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(p, -1.0) for p in pieces], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def _word_piece(cleanup: bool = True) -> Any:
    pieces = ["[UNK]", "##llo", "##a", "##", *WORDS]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


def _suffix() -> Any:
    tokenizer = _bpe(["a", "b</w>", "he", "llo</w>", "</w>", "c</w>d"])
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def _no_decoder() -> Any:
    words = {w: i for i, w in enumerate(["x", *WORDS])}
    return tokenizers.Tokenizer(models.WordLevel(words, unk_token="x"))


def _with(decoder: Any) -> Any:
    tokenizer = _sentencepiece()
    tokenizer.decoder = decoder
    return tokenizer


_MAKERS: dict[str, Any] = {
    "byte_level": _byte_level,
    "byte_level_in_a_chain": lambda: _byte_level_chain(),
    "sentencepiece": _sentencepiece,
    "sentencepiece_without_prefix": lambda: _sentencepiece(False),
    "byte_fallback_alone": lambda: _with(decoders.ByteFallback()),
    "metaspace": _metaspace,
    "metaspace_never": lambda: _metaspace("never"),
    "word_piece": _word_piece,
    "word_piece_as_it_is": lambda: _word_piece(False),
    "suffix": _suffix,
    "none": _no_decoder,
    "ctc": lambda: _with(decoders.CTC()),
    "replace_behind_fuse": lambda: _with(
        decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "-"), decoders.Strip("-", 2, 0)])
    ),
    "pattern_behind_fuse": lambda: _with(
        decoders.Sequence([decoders.Fuse(), decoders.Replace(tokenizers.Regex("a+"), "-")])
    ),
}  # fmt: skip
KINDS = tuple(_MAKERS)


def _byte_level_chain() -> Any:
    tokenizer = _byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", " ")])
    return tokenizer


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """Return the tokenizer of a kind, of the package ``tokenizers``."""
    return _add(_MAKERS[kind]())
