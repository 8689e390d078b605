"""A tokenizer for tests: one word a token."""

from typing import Any

import pytest

__all__ = ["word_tokenizer"]


def word_tokenizer(vocab_size: int) -> Any:
    """Return the tokenizer of words w0, w1 and so on, as transformers has them."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    vocabulary = {f"w{token}": token for token in range(vocab_size)}
    # transformers' StopStringCriteria puts this word before each token.
    words = tokenizers.models.WordLevel(vocabulary | {"abcdef": vocab_size}, unk_token="w0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
