"""The perplexity of a text, and log-probabilities of tokens, on tiny models against plain torch."""

import math
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import quality
from lmdecode.linear.formats import FORMATS
from lmdecode.quality import bits_per_weight, perplexity, token_logprobs
from tests.decoder.decoder_models import make_model
from tests.support.causal_models import random_model, random_tokens


def plain(model: Any, ids: torch.Tensor, window: int, bos: int | None) -> tuple[float, int]:
    """The rule as it is said: of each window the tokens behind the first of the second half."""
    losses = []
    for at in range(0, len(ids) - window + 1, window):
        tokens = ids[at : at + window].clone()
        if bos is not None:
            tokens[0] = bos
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].double().log_softmax(-1)
        losses += [-log_probs[i - 1, tokens[i]] for i in range(window // 2 + 1, window)]
    return math.exp(torch.stack(losses).mean()), len(losses)


@pytest.mark.parametrize("window", [4, 7, 16])
@pytest.mark.parametrize("bos", [None, 3])
@pytest.mark.parametrize("most_logits", [1, 100, 1 << 24])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_it_is_that_of_plain_torch(
    architecture: str, most_logits: int, bos: int | None, window: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(quality, "_MOST_LOGITS", most_logits)
    model, ids = random_model(architecture, "plain"), random_tokens(3 * window + 2)
    read: list[int] = []
    found = perplexity(
        lmdecode.Decoding.from_pretrained(model), ids, window, bos=bos, on_tokens=read.append
    )
    want, scored = plain(model, ids, window, bos)
    assert found.perplexity == pytest.approx(want, rel=1e-5)
    assert (found.scored, found.read, read) == (scored, 3 * window, [window] * 3)
    assert found.standard_error > 0 and found.tokens_per_second > 0


def test_the_logits_are_held_in_parts(monkeypatch: Any) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))
    ids = random_tokens(64)
    whole = perplexity(decoding, ids, 32).perplexity
    monkeypatch.setattr(quality, "_MOST_LOGITS", 3 * decoding.config.vocab_size)
    assert perplexity(decoding, ids, 32).perplexity == whole  # the same bits


@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("most_logits", [1, 300, 1 << 24])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_log_probabilities_of_tokens_are_those_of_plain_torch(
    architecture: str, most_logits: int, length: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(quality, "_MOST_LOGITS", most_logits)
    model, ids = random_model(architecture, "plain"), random_tokens(length)
    found = token_logprobs(lmdecode.Decoding.from_pretrained(model), ids.tolist(), 3)
    assert [item.token for item in found] == ids.tolist()
    assert math.isnan(found[0].logprob) and found[0].top == ()
    with torch.no_grad():
        log_probs = model(ids[None]).logits[0].double().log_softmax(-1)
    for before, item in zip(log_probs, found[1:], strict=False):
        assert item.logprob == pytest.approx(float(before[item.token]), rel=1e-4, abs=1e-5)
        best = [logprob for _, logprob in item.top]
        assert best == pytest.approx(before.topk(3).values.tolist(), rel=1e-4, abs=1e-5)
        assert best == pytest.approx([float(before[token]) for token, _ in item.top], rel=1e-4)


def test_log_probabilities_have_the_same_bits_in_parts(monkeypatch: Any) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))
    ids = random_tokens(64)
    whole = token_logprobs(decoding, ids, 2)[1:]
    monkeypatch.setattr(quality, "_MOST_LOGITS", 3 * decoding.config.vocab_size)
    assert token_logprobs(decoding, ids, 2)[1:] == whole


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"ids": []}, ValueError, "ids has 0 tokens; expected at least one"),
        ({"ids": ["a"]}, TypeError, "ids is of type list"),
        ({"ids": [-1]}, ValueError, "ids are -1 to -1; expected 0"),
        ({"ids": [1] * 9999}, ValueError, "ids has 9999 tokens; expected at most"),
        ({"num_top": -1}, ValueError, "num_top is -1; expected 0"),
    ],
)
def test_what_has_no_log_probabilities(change: dict[str, Any], error: type, text: str) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model("gpt2", "plain"))
    with pytest.raises(error, match=f"token_logprobs: {text}"):
        token_logprobs(decoding, **{"ids": [1, 2], **change})


def test_bits_of_a_weight() -> None:
    model = random_model("llama", "plain")
    bits = {
        dtype: bits_per_weight(lmdecode.Decoding.from_pretrained(model, dtype)) for dtype in FORMATS
    }
    assert bits["float32"] >= 32 and bits["bfloat16"] >= 16
    assert bits["float32"] > bits["bfloat16"] > bits["int8"] >= 8
    assert bits["int8"] > bits["int4"] > 4


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"ids": [1, 2, 3, 4]}, TypeError, "ids is of type list; expected a tensor"),
        ({"ids": torch.zeros(2, 8, dtype=torch.int64)}, ValueError, r"ids has shape \[2, 8\]"),
        ({"ids": torch.zeros(8)}, ValueError, r"ids has .* dtype torch.float32; expected \[n\]"),
        ({"ids": torch.tensor([1, 2, 3])}, ValueError, "ids has 3 tokens; expected at least 8"),
        ({"ids": torch.full((8,), 1 << 20)}, ValueError, "ids are 1048576 to 1048576; expected 0"),
        ({"window": 3}, ValueError, "window is 3; expected 4 to"),
        ({"bos": -1}, ValueError, "bos is -1; expected None or a token"),
        ({"decoding": "a"}, TypeError, "decoding is of type str; expected a Decoding"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], error: type, text: str) -> None:
    given: dict[str, Any] = {"ids": random_tokens(16), "window": 8, **change}
    if "decoding" not in given:
        given["decoding"] = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))
    with pytest.raises(error, match=f"perplexity: {text}"):
        perplexity(**given)


def test_an_encoder_decoder_model_is_refused() -> None:
    decoding = lmdecode.Decoding.from_pretrained(make_model("marian"))
    with pytest.raises(ValueError, match="expected a decoder-only model"):
        perplexity(decoding, random_tokens(16), 8)
    with pytest.raises(ValueError, match=r"token_logprobs: .* expected a decoder-only model"):
        token_logprobs(decoding, [1, 2])
    with pytest.raises(ValueError, match=r"bits_per_weight: .* expected a decoder-only model"):
        bits_per_weight(decoding)
