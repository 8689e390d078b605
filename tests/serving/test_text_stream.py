"""The text of tokens as they come is that of all of them."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmdecode.serving import Tokenizer
from tests.serving.tokenizer_kinds import KINDS, tokenizer_of


def streamed(tokenizer: Tokenizer, ids: list[int], parts: list[int], skip: bool) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    texts, at = [], 0
    for part in parts:
        texts.append(stream.push(ids[at : at + part]))
        at += part
    return [*texts, stream.push(ids[at:]), stream.finish()]


@functools.cache
def made(kind: str, cleans_up: bool = False) -> Tokenizer:
    """Make a tokenizer, once for all examples."""
    return Tokenizer(tokenizer_of(kind), cleans_up=cleans_up)


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_text_is_that_of_decode(kind: str, cleans_up: bool, data: st.DataObject) -> None:
    tokenizer = made(kind, cleans_up)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=14))
    parts = data.draw(st.lists(st.integers(0, 3), max_size=14))
    skip = data.draw(st.booleans())
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, parts, skip)) == text


@given(st.text(max_size=12))
@settings(max_examples=100, deadline=None)
@example("\U0001f600 \u4e2d\u6587 a.")
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_without_prefix"])
def test_texts_come_back_token_by_token(kind: str, text: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = "".join(streamed(tokenizer, ids, [1] * len(ids), False))
    assert whole == tokenizer.decode(ids, skip_special_tokens=False)
    if kind == "byte_level":
        assert whole == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_a_character_comes_when_it_is_whole() -> None:
    tokenizer = Tokenizer(tokenizer_of("byte_level"))
    ids = tokenizer.encode("a\U0001f600b", add_special_tokens=False)
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "\U0001f600", "b"]


def test_bytes_come_when_their_run_is_over_or_is_no_text() -> None:
    """A byte that follows can make each byte of the run before it a U+FFFD."""
    tokenizer = Tokenizer(tokenizer_of("sentencepiece_without_prefix"))
    run = [tokenizer.inner.token_to_id(f"<0x{byte:02X}>") for byte in "\U0001f600".encode()]
    a = tokenizer.inner.token_to_id("a")
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in [*run, a]] == ["", "", "", "", "\U0001f600a"]
    stream = tokenizer.stream()
    texts = [stream.push([token]) for token in [*run, run[-1], run[0], a]]
    assert texts == ["", "", "", "", "\ufffd" * 5, "\ufffd", "a"]


def test_words_of_every_kind_come_at_once() -> None:
    """But for decoders that need the whole text."""
    for kind in KINDS:
        tokenizer = Tokenizer(tokenizer_of(kind))
        ids = [tokenizer.inner.token_to_id(word) for word in ("he", "he", "he", "he")]
        stream = tokenizer.stream()
        first = stream.push(ids)
        waits = kind in ("ctc", "pattern_behind_fuse")
        assert (first == "") == waits, kind
