"""``generate()`` on an engine gives what its loops over steps give, and knows what it cannot do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.integrations.transformers.decoding import causal_generation
from lmdecode.integrations.transformers.decoding.causal_generation import search_on_engine
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
        given.append(search_on_engine(*arguments))
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
        lambda *arguments: given.append(search_on_engine(*arguments)),
    )
    decoding.generate(**_prompts(False), max_new_tokens=4, num_beams=4, pad_token_id=0, **options)
    assert given in ([], [None])


def test_a_search_that_fails_names_its_prompt(decoding: lmdecode.Decoding) -> None:
    with pytest.raises(RuntimeError, match="no candidate above -inf"):
        decoding.generate(
            **_prompts(False), max_new_tokens=4, num_beams=2, suppress_tokens=list(range(VOCAB))
        )


def test_a_small_engine_is_kept_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"))
    made: list[Any] = []

    def engine(*arguments: Any, **options: Any) -> Any:
        made.append(lmdecode.Engine(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(causal_generation, "Engine", engine)
    asked: dict[str, Any] = {**_prompts(True), "pad_token_id": 0}
    first = decoding.generate(**asked, max_new_tokens=5)
    for _ in range(2):
        assert torch.equal(decoding.generate(**asked, max_new_tokens=5), first)
    beams = decoding.generate(input_ids=asked["input_ids"][:1], max_new_tokens=5, num_beams=3)
    assert torch.equal(decoding.generate(**asked, max_new_tokens=6)[:, : first.shape[1]], first)
    assert len(made) == 1  # three rows each
    # One that has failed is not kept, nor one with drafts, nor a large one.
    monkeypatch.setattr(causal_generation.EngineCall, "submit", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoding.generate(**asked, max_new_tokens=5)
    monkeypatch.undo()
    monkeypatch.setattr(causal_generation, "Engine", engine)
    assert torch.equal(decoding.generate(**asked, max_new_tokens=5), first)
    decoding.generate(**asked, max_new_tokens=5, prompt_lookup_num_tokens=3)
    assert len(made) == 3 and len(decoding.spare_engines) == 1
    decoding.generate(**asked, max_new_tokens=5)
    assert len(made) == 3
    monkeypatch.setattr(causal_generation, "_KEPT_BYTES", 1 << 10)
    decoding.generate(input_ids=asked["input_ids"][:1], max_new_tokens=5)
    assert len(made) == 4 and len(decoding.spare_engines) == 1
    copied = pickle.loads(pickle.dumps(decoding.spare_engines))
    assert len(copied) == 0 and beams.shape[0] == 1


def test_an_engine_of_other_settings_is_not_taken() -> None:
    decoding, other = (
        lmdecode.Decoding.from_pretrained(random_model("llama", kind))
        for kind in ("plain", "linear")
    )
    asked: dict[str, Any] = {**_prompts(False), "max_new_tokens": 9, "pad_token_id": 0}
    expected = other.generate(**asked)
    decoding.generate(**asked)
    copied = copy.copy(decoding)
    copied.cache_dtype = "int8"
    copied.generate(**asked)
    assert len(decoding.spare_engines) == 2
    decoding.decoder = other.decoder
    assert torch.equal(decoding.generate(**asked), expected)
