"""``generate()`` on an engine gives what its loops over steps give, and knows what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.integrations.transformers.decoding import causal_generation, engine_call
from tests.support.causal_models import EOS, VOCAB, random_model

SEARCHES: list[dict[str, Any]] = [
    {},
    {"num_beams": 2, "early_stopping": True, "length_penalty": 0.3},
    {"num_beams": 3, "num_return_sequences": 3, "early_stopping": "never"},
    {"min_new_tokens": 3, "suppress_tokens": [5, 6, 7]},
    {"bad_words_ids": [[9], [11]], "sequence_bias": {(12,): 3.0, (13,): -2.0}},
    {"forced_eos_token_id": EOS, "min_length": 12},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
]


@pytest.fixture(scope="module")
def decoding() -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))


def _prompts(padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCAB, (3, 8), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
        mask[2, :1] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", SEARCHES, ids=str)
def test_searches_are_those_of_the_loop(
    decoding: lmdecode.Decoding,
    options: dict[str, Any],
    padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Tensor | None] = []

    def on_engine(*arguments: Any) -> Tensor | None:
        given.append(engine_call.search_on_engine(*arguments))
        return given[-1]

    asked: dict[str, Any] = {
        **_prompts(padded), "max_new_tokens": 9, "num_beams": 4, "eos_token_id": EOS,
        "pad_token_id": 0, **options,
    }  # fmt: skip
    monkeypatch.setattr(causal_generation, "search_on_engine", on_engine)
    by_engine = decoding.generate(**asked)
    # Penalties look at the padding in transformers, and an engine has none.
    assert (given[0] is None) == (padded and "repetition_penalty" in options)
    monkeypatch.setattr(causal_generation, "search_on_engine", lambda *arguments: None)
    assert torch.equal(by_engine, decoding.generate(**asked))


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beam_groups": 2, "diversity_penalty": 0.5},
        {"return_dict_in_generate": True, "output_scores": True},
        {"logits_processor": [lambda ids, scores: scores]},
        {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
        {"force_words_ids": [[7]]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_loop_does_what_an_engine_cannot(
    decoding: lmdecode.Decoding, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(
        causal_generation,
        "search_on_engine",
        lambda *arguments: given.append(engine_call.search_on_engine(*arguments)),
    )
    decoding.generate(**_prompts(False), max_new_tokens=4, num_beams=4, pad_token_id=0, **options)
    assert given in ([], [None])


def test_a_search_that_fails_names_its_prompt(decoding: lmdecode.Decoding) -> None:
    with pytest.raises(RuntimeError, match="no candidate above -inf"):
        decoding.generate(
            **_prompts(False), max_new_tokens=4, num_beams=2, suppress_tokens=list(range(VOCAB))
        )
