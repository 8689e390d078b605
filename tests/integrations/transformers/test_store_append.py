"""``append=True``, texts that do not continue their session, and sessions that are not there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from store_models import ANSWER, DECODERS, ids, model_of, store_of

from lmdecode.integrations.transformers import generate_with_store
from tests.support.tiny_models import PAD

_TURNS = [ids(11), ids(5, seed=1), ids(7, seed=2)]


def _say(model: Any, store: Any, tokens: torch.Tensor, **options: Any) -> list[int]:
    result = generate_with_store(model, store, "a", tokens, **{**ANSWER, **options})
    return list(result[0].tolist())


@pytest.mark.parametrize("name", DECODERS)
def test_new_tokens_alone_are_the_whole_conversation(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    with store_of(model, tmp_path / "whole") as store:
        tokens: list[int] = []
        for turn in _TURNS:
            whole = torch.tensor([[*tokens, *turn[0].tolist()]])
            tokens = _say(model, store, whole, attention_mask=torch.ones_like(whole))
    for turn in _TURNS:  # each in a new store object: the session comes from the disk
        with store_of(model, tmp_path / "append") as store:
            appended = _say(model, store, turn, append=True)
    assert appended == tokens


def test_a_mask_is_that_of_the_new_tokens(tmp_path: Path) -> None:
    model = model_of("llama")
    padded = torch.tensor([[PAD, 5]])
    with store_of(model, tmp_path) as store:
        _say(model, store, _TURNS[0], append=True)
        with pytest.raises(ValueError, match="padding token"):
            _say(model, store, padded, append=True)
        with pytest.raises(ValueError, match=r"another shape than the new tokens.*\[1, 2\]"):
            _say(model, store, padded, append=True, attention_mask=torch.ones(1, 20))
        before = store.session("a").tokens
        tokens = _say(model, store, padded, append=True, attention_mask=torch.ones(1, 2))
    assert tokens[: len(before) + 2] == [*before, PAD, 5]


def test_an_encoder_has_no_new_tokens(tmp_path: Path) -> None:
    model = model_of("t5")
    with store_of(model, tmp_path) as store, pytest.raises(ValueError, match="append is True"):
        _say(model, store, _TURNS[0], append=True)


def test_a_shorter_or_another_text_is_an_error(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        tokens = _say(model, store, _TURNS[0])
        for other in (_TURNS[1], torch.tensor([tokens[:-1]]), _TURNS[0]):
            with pytest.raises(ValueError, match="of the 20 tokens of session 'a'; expected all"):
                _say(model, store, other)
            assert store.session("a").tokens == tokens
        again = _say(model, store, _TURNS[0], rewind=True)
        assert again == tokens
        assert _say(model, store, _TURNS[1], rewind=True) == store.session("a").tokens


def test_the_tokens_of_an_unknown_session_are_none(tmp_path: Path) -> None:
    model = model_of("llama")
    with store_of(model, tmp_path) as store:
        assert store.session("a").input_ids is None
        with pytest.raises(TypeError, match=r"input_ids is a torch.float32 tensor; expected"):
            _say(model, store, torch.tensor([store.session("a").tokens]))
        tokens = _say(model, store, _TURNS[0])
        known = store.session("a").input_ids
        assert known.dtype == torch.int64 and known.tolist() == [tokens]
