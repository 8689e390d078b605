"""Whisper's tokenizer: texts to tokens, tokens to texts and words."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmdecode._checks import install_hint

__all__ = ["SpeechTokenizer", "load_tokenizer"]

# Languages without spaces between words: a word is one or more whole characters.
_WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"Transcriber: texts need the package tokenizers: {install_hint('audio')}"
        ) from error
    return tokenizers


def load_tokenizer(folder: Path) -> Any:
    """Return the ``tokenizers.Tokenizer`` of a folder, or None where it has none.

    Raises
    ------
    ImportError
        The package is missing.
    ValueError
        The file is damaged.
    """
    tokenizers = _tokenizers()
    whole, vocab, merges = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    try:
        if whole.is_file():
            return tokenizers.Tokenizer.from_file(str(whole))
        if vocab.is_file() and merges.is_file():
            return _of_vocabulary(tokenizers, vocab, merges, folder / "added_tokens.json")
    except Exception as error:  # the package raises Exception itself
        raise ValueError(
            f"Transcriber: the tokenizer of {folder} cannot be read ({error}); expected one of "
            "Whisper"
        ) from error
    return None


def _of_vocabulary(tokenizers: Any, vocab: Path, merges: Path, added: Path) -> Any:
    """Return the tokenizer of an old folder without tokenizer.json."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    if added.is_file():
        numbers = json.loads(added.read_text(encoding="utf-8"))
        found.add_special_tokens(sorted(numbers, key=numbers.__getitem__))
    return found


class SpeechTokenizer:
    """Converts the texts of one model; their tokens are below ``end``, the end token."""

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer = tokenizer
        self._end = end

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another."""
        found = self._tokenizer.encode(f" {text.strip()}", add_special_tokens=False).ids
        return [token for token in found if token < self._end]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special ones and times are left out."""
        text: str = self._tokenizer.decode([token for token in tokens if token < self._end])
        return text

    def words(self, tokens: Sequence[int], language: str) -> list[tuple[str, int]]:
        """Return the words of tokens below the end token, and the number of tokens of each."""
        pieces = list(self._characters(tokens))
        if language in _WITHOUT_SPACES:
            return pieces
        words: list[tuple[str, int]] = []
        for text, count in pieces:
            begins = text.startswith(" ") or text.strip() in string.punctuation
            if begins or not words:
                words.append((text, count))
            else:
                before, of_before = words[-1]
                words[-1] = before + text, of_before + count
        return words

    def _characters(self, tokens: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield the shortest runs of tokens that are whole characters."""
        whole, done, begin = self.decode(tokens), 0, 0
        for end in range(1, len(tokens) + 1):
            text = self.decode(tokens[begin:end])
            at = text.find(_UNFINISHED)
            # The text itself may have this character.
            if at < 0 or whole[done + at : done + at + 1] == _UNFINISHED or end == len(tokens):
                yield text, end - begin
                done += len(text)
                begin = end
