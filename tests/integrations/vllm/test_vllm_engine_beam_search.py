"""Beam search in vLLM's engine, on the shipped model, against transformers."""

from typing import Any

import pytest
import torch
from engines import MODEL, job_of, needs_engine, prompt_of, run

pytestmark = [needs_engine, pytest.mark.slow]

PROMPTS = [prompt_of(6, 1), prompt_of(3, 2), prompt_of(150, 3)]
SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 4, "max_new_tokens": 16},
    {"num_beams": 3, "max_new_tokens": 40, "length_penalty": 0.5, "num_return_sequences": 3},
    {"num_beams": 4, "max_new_tokens": 12, "early_stopping": True, "no_repeat_ngram_size": 2},
]


@pytest.fixture(scope="module")
def found() -> list[list[dict[str, Any]]]:
    job = job_of({"max_logprobs": 512}, [])
    job["searches"] = [
        {"prompts": PROMPTS, "arguments": search | {"eos_token_id": 1, "pad_token_id": 2}}
        for search in SEARCHES
    ]
    results: list[list[dict[str, Any]]] = run(job)["batches"]
    return results


@pytest.mark.parametrize("search", range(len(SEARCHES)))
def test_sequences_and_scores_are_those_of_transformers(
    search: int, found: list[list[dict[str, Any]]]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for prompt, ours in zip(PROMPTS, found[search], strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), do_sample=False, return_dict_in_generate=True,
            output_scores=True, **SEARCHES[search],
        )  # fmt: skip
        assert ours["sequences"] == theirs.sequences.tolist()
        expected = theirs.sequences_scores.tolist()
        assert ours["scores"] == pytest.approx(expected, abs=1e-5, rel=1e-5)
