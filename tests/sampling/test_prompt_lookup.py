"""prompt_lookup against plain torch, and what it refuses."""

from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import reference


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_random_texts(dtype: torch.dtype) -> None:
    """Of few tokens, so that n-grams of every length come again."""
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = set()
    for _ in range(2000):
        batch, length, vocab = number(0, 4), number(0, 40), number(1, 6)
        texts = torch.randint(0, vocab, (batch, length), generator=generator).to(dtype)
        lengths = torch.randint(0, length + 1, (batch,), generator=generator).to(dtype)
        num_tokens, max_ngram = number(1, 7), number(1, 6)
        given: dict[str, Any] = {} if number(0, 2) else {"lengths": lengths}
        got = lmdecode.prompt_lookup(texts, num_tokens, max_ngram, **given)
        assert got.dtype == torch.int64
        assert got.equal(reference.prompt_lookup(texts, num_tokens, max_ngram, **given))
        found |= {int((row >= 0).sum()) for row in got}
    assert found == set(range(7))


def test_the_earliest_place_of_the_longest_n_gram() -> None:
    text = torch.tensor([7, 9, 1, 2, 9, 3, 2, 9, 4, 5, 2, 9])
    assert lmdecode.prompt_lookup(text, 4).tolist() == [3, 2, 9, 4]  # behind "2 9", not behind "9"
    assert lmdecode.prompt_lookup(text, 4, 1).tolist() == [1, 2, 9, 3]
    assert lmdecode.prompt_lookup(text[:6], 2).tolist() == [-1, -1]
    assert lmdecode.prompt_lookup(torch.tensor([5, 5]), 3).tolist() == [5, -1, -1]


def test_strides() -> None:
    texts = torch.arange(24).view(2, 12) % 5
    wide = torch.stack((texts, texts + 1), dim=2)[:, :, 0]
    assert lmdecode.prompt_lookup(wide, 3).equal(lmdecode.prompt_lookup(texts, 3))
    assert lmdecode.prompt_lookup(wide[0], 3).equal(lmdecode.prompt_lookup(texts, 3)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": [1, 2]}, TypeError, "tokens is of type list"),
        ({"tokens": torch.ones(2, 3)}, ValueError, "tokens has dtype float32"),
        ({"tokens": torch.ones(1, 2, 3, dtype=torch.int64)}, ValueError, "tokens has shape"),
        ({"num_tokens": 0}, ValueError, r"num_tokens is 0; expected 1 to 2\^24"),
        ({"num_tokens": 2.0}, TypeError, "num_tokens is of type float"),
        ({"max_ngram": 0}, ValueError, "max_ngram is 0"),
        ({"lengths": torch.tensor([3])}, ValueError, "lengths has shape"),
        ({"lengths": torch.tensor([3, 4])}, ValueError, r"lengths\[1\] is 4; expected 0 to 3"),
        ({"lengths": torch.tensor([-1, 2])}, ValueError, r"lengths\[0\] is -1; expected 0 to 3"),
        ({"lengths": torch.tensor([1.0, 2.0])}, ValueError, "lengths has dtype float32"),
        ({"lengths": [1, 2]}, TypeError, "lengths is of type list"),
        (
            {"tokens": torch.arange(3), "lengths": torch.tensor([1])},
            ValueError,
            "lengths is given; expected None",
        ),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    right: dict[str, Any] = {"tokens": torch.ones(2, 3, dtype=torch.int64), "num_tokens": 2}
    with pytest.raises(error, match=f"^prompt_lookup: {message}"):
        lmdecode.prompt_lookup(**(right | arguments))
