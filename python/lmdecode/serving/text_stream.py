"""Text of tokens as they come: what ``decode`` gives of all of them, in parts.

A decoder of ``tokenizers`` is a chain of stages from words to words. Each stage here does the same
word by word, and holds back what a word to come can change.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

__all__ = ["CLEAN_UP", "ByteTable", "Stage", "TextReplace", "added_words", "held", "stages_of"]

#: What transformers replaces in a text that is cleaned up, one after the other.
CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
_BYTE = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
_UNKNOWN = "\ufffd"


def held(text: str, words: Iterable[str]) -> int:
    """Return how many last characters of a text may begin one of some words."""
    most = 0
    for word in words:
        at = text.find(word[:1], max(0, len(text) - len(word) + 1))
        while at >= 0 and not word.startswith(text[at:]):
            at = text.find(word[:1], at + 1)
        if at >= 0:
            most = max(most, len(text) - at)
    return most


class Stage(Protocol):
    """A step from words to words, which returns the first ones before the last are there."""

    def push(self, words: Sequence[str]) -> Sequence[str]:
        """Take words; return those that cannot change any more."""

    def finish(self) -> Sequence[str]:
        """Return what was held back, when there are no more words."""


class ByteTable:
    """The bytes that the characters of a byte-level token stand for."""

    def __init__(self) -> None:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
        self._letter_of = {byte: letter for letter, byte in self._byte_of.items()}

    def token_of(self, text: str) -> str:
        """Return the token with the bytes of a text."""
        return "".join(self._letter_of[byte] for byte in text.encode())

    def bytes_of(self, token: str) -> bytes:
        """Return a token's bytes; one with other characters stands for itself."""
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:
            return token.encode()


BYTES = ByteTable()


class _ByteLevel:
    """Bytes to text; U+FFFD for bytes that are no UTF-8."""

    def __init__(self, bytes_of: Callable[[str], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, words: Sequence[str]) -> Sequence[str]:
        text = self._decoder.decode(b"".join(map(self._bytes_of, words)))
        return [text] if text else ()

    def finish(self) -> Sequence[str]:
        return [self._decoder.decode(b"", final=True)]


class _EachWord:
    """What is done to each word by itself, but for the first one, which may differ."""

    def __init__(self, first: Callable[[str], str], others: Callable[[str], str]) -> None:
        self._next, self._others = first, others

    def push(self, words: Sequence[str]) -> Sequence[str]:
        if not words:
            return words
        first, self._next = self._next, self._others
        return [first(words[0]), *map(self._others, words[1:])]

    def finish(self) -> Sequence[str]:
        return ()


class _ByteFallback:
    """Runs of words that are bytes: their text, or U+FFFD for each of them if they are no UTF-8."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._held, self._is_text, self._text = 0, True, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def _byte(self, byte: int) -> Iterable[str]:
        if self._is_text:
            self._held += 1
            try:
                self._text += self._decoder.decode(bytes([byte]))
                return ()
            except UnicodeDecodeError:
                self._is_text = False
                return [_UNKNOWN] * self._held
        return [_UNKNOWN]

    def _end(self) -> Iterable[str]:
        held, text, is_text = self._held, self._text, self._is_text
        is_whole = not self._decoder.getstate()[0]
        self._begin()
        if not held or not is_text:
            return ()
        return [text] if is_whole else [_UNKNOWN] * held

    def push(self, words: Sequence[str]) -> Sequence[str]:
        found: list[str] = []
        for word in words:
            match = _BYTE.fullmatch(word)
            if match:
                found += self._byte(int(match[1], 16))
            else:
                found += self._end()
                found.append(word)
        return found

    def finish(self) -> Sequence[str]:
        return [*self._end()]


class _Suffix:
    """Words with a suffix that is a space, except at the last one."""

    def __init__(self, suffix: str) -> None:
        self._suffix, self._last = suffix, ""

    def push(self, words: Sequence[str]) -> Sequence[str]:
        if not words:
            return words
        *whole, last = [self._last, *words]
        self._last = last
        return [word.replace(self._suffix, " ") for word in whole]

    def finish(self) -> Sequence[str]:
        last, self._last = self._last, ""
        return [last.replace(self._suffix, "")]


class TextReplace:
    """``text.replace(old, new)`` of a text that comes in parts."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._held = old, new, ""

    def push(self, words: Sequence[str]) -> Sequence[str]:
        """See ``Stage``."""
        text, old = self._held + "".join(words), self._old
        at, found = 0, []
        while (place := text.find(old, at)) >= 0:
            found += [text[at:place], self._new]
            at = place + len(old)
        rest = text[at:]
        keep = held(rest, (old,))
        self._held = rest[len(rest) - keep :]
        return [*found, rest[: len(rest) - keep]]

    def finish(self) -> Sequence[str]:
        """See ``Stage``."""
        held, self._held = self._held, ""
        return [held]


class _StripStart:
    """Removes up to a number of a character from the beginning of a text that comes in parts."""

    def __init__(self, character: str, most: int) -> None:
        self._character, self._left = character, most

    def push(self, words: Sequence[str]) -> Sequence[str]:
        if not self._left:
            return words
        text = "".join(words)
        while self._left and text:
            if text[0] != self._character:
                self._left = 0
                break
            text, self._left = text[1:], self._left - 1
        return [text]

    def finish(self) -> Sequence[str]:
        return ()


class _AtTheEnd:
    """All words at once, when there are no more: for an unknown decoder."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode, self._words = decode, list[str]()

    def push(self, words: Sequence[str]) -> Sequence[str]:
        self._words += words
        return ()

    def finish(self) -> Sequence[str]:
        words, self._words = self._words, []
        return [self._decode(words)] if words else ()


def _joined(word: str) -> str:
    return f" {word}"


def _whole(word: str) -> str:
    return word


def stages_of(decoder: Any) -> tuple[list[Callable[[], Stage]], Callable[[str], bytes]]:
    """Return a maker of a decoder's stages, and a function from a token to its bytes in a text.

    Without a decoder of the package tokenizers, words are joined by spaces.
    """
    if decoder is None:
        return [lambda: _EachWord(_whole, _joined)], str.encode
    state = json.loads(decoder.__getstate__())
    links = state["decoders"] if state["type"] == "Sequence" else [state]
    makers: list[Callable[[], Stage]] = []
    word_stages: list[Callable[[str], str]] = []
    of_bytes: Callable[[str], bytes] | None = None
    is_text = has_bytes = False  # whether words have been joined to one, or bytes are words
    for link in links:
        kind = link["type"]
        if kind == "Fuse":
            is_text = True
        elif kind == "Strip" and is_text and not link["stop"]:
            makers.append(functools.partial(_StripStart, link["content"], link["start"]))
        elif kind == "Replace" and is_text and link["pattern"].get("String"):
            makers.append(
                functools.partial(TextReplace, link["pattern"]["String"], link["content"])
            )
        elif is_text:
            break
        elif kind == "ByteLevel":
            cached = functools.cache(BYTES.bytes_of)
            makers.append(functools.partial(_ByteLevel, cached))
            is_text, of_bytes = True, cached
        elif kind == "ByteFallback":
            has_bytes = True
            makers.append(_ByteFallback)
        elif kind in ("Replace", "Strip", "Metaspace", "WordPiece"):
            first, others = _of_each(_part(link), kind in ("Metaspace", "WordPiece"))
            makers.append(functools.partial(_EachWord, first, others))
            word_stages.append(others)
        elif kind == "BPEDecoder":
            makers.append(functools.partial(_Suffix, link["suffix"]))
            word_stages.append(functools.partial(_spaced, link["suffix"]))
        else:
            break
    else:
        if of_bytes is None:
            of_bytes = functools.cache(functools.partial(_word_bytes, has_bytes, word_stages))
        return makers, of_bytes
    # What is left of the chain needs the whole text, and so does all of it.
    bytes_of = BYTES.bytes_of if any(link["type"] == "ByteLevel" for link in links) else str.encode
    return [functools.partial(_AtTheEnd, decoder.decode)], bytes_of


def added_words(inner: Any) -> dict[int, str]:
    """Return what a decoder takes for added tokens so that it gives their contents, by number.

    A byte-level decoder takes the letters of a word for bytes, though an added word is text as it
    is. A token that is the model's own as well, a letter or what merges make, stays bytes.
    """
    if inner.decoder is None or b'"ByteLevel"' not in inner.decoder.__getstate__():
        return {}
    contents = {id_: token.content for id_, token in inner.get_added_tokens_decoder().items()}
    odd = {id_: of for id_, of in contents.items() if BYTES.bytes_of(of) != of.encode()}
    own = {id_ for id_ in odd if inner.model.id_to_token(id_) is not None}
    if own:  # a GGUF file has all tokens there
        merges = json.loads(inner.model.__getstate__()).get("merges", ())
        made = {merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
                for merge in merges}  # fmt: skip
        own = {id_ for id_ in own if len(odd[id_]) == 1 or odd[id_] in made}
    return {id_: BYTES.token_of(of) for id_, of in odd.items() if id_ not in own}


def _part(state: dict[str, Any]) -> Any:
    """Return the decoder of a link of a chain."""
    from tokenizers import decoders

    part = decoders.Sequence([])
    part.__setstate__(json.dumps(state).encode())
    return part


def _of_each(part: Any, is_by_place: bool) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return what a decoder makes of a first word, and of another."""

    def first(word: str) -> str:
        text: str = part.decode([word])
        return text

    @functools.lru_cache(1 << 17)
    def others(word: str) -> str:
        text: str = part.decode(["", word] if is_by_place else [word])
        return text

    return (first, others) if is_by_place else (others, others)


def _spaced(suffix: str, word: str) -> str:
    return word.replace(suffix, " ")


def _word_bytes(has_bytes: bool, stages: Sequence[Callable[[str], str]], word: str) -> bytes:
    match = _BYTE.fullmatch(word) if has_bytes else None
    if match:
        return bytes([int(match[1], 16)])
    for stage in stages:
        word = stage(word)
    return word.encode()
