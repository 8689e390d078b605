"""Options of ``generate_batch``: each has its effect of ``generate()``, or is refused."""

import copy
from typing import Any

import pytest
import torch
from test_generate_batch import batching, config, one_by_one, prompts, texts_of
from transformers import GenerationConfig
from window_models import build_window_model

from lmdecode.integrations.transformers import BatchingManager, generate_batch
from lmdecode.integrations.transformers.continuous_batching import batching_manager as options

GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 15},
    {"min_length": 40},
    {"bad_words_ids": [[5], [24, 28]]},
    {"begin_suppress_tokens": [24, 32]},
    {"forced_eos_token_id": 2},
    {"forced_bos_token_id": 9},
    {"exponential_decay_length_penalty": (3, 1.5)},
    {"sequence_bias": [[[24, 28], -5.0], [[7], 3.0]]},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 2},
    {"max_length": 45, "max_new_tokens": None},
    {"length_penalty": 2.0, "num_beams": 1, "guidance_scale": 1.0},
]
DRAWN: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0.7, "top_k": 9},
    {"typical_p": 0.7},
    {"top_p": 0.8, "typical_p": 0.9, "min_new_tokens": 15},
    {"epsilon_cutoff": 0.02, "no_repeat_ngram_size": 2},
    {"top_h": 0.5, "renormalize_logits": True},
]
END = 28  # which the model writes soon


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_window_model("Llama")


def settings_of(arguments: dict[str, Any], **others: Any) -> GenerationConfig:
    settings = config(**{"top_k": 0} if others.get("do_sample") else {}, **others)
    settings.update(eos_token_id=END)
    settings.update(**arguments)
    return settings


@pytest.mark.parametrize("do_sample", [False, True])
def test_texts_are_those_of_generate_with_each_option(llama: Any, do_sample: bool) -> None:
    """Also in the company of others, and of requests that are put back and computed again."""
    texts = prompts(4)
    seeds = list(range(len(texts))) if do_sample else None
    plain = one_by_one(llama, texts, settings_of({}, do_sample=do_sample), seeds)
    changed = 0
    for arguments in DRAWN if do_sample else GREEDY:
        settings = settings_of(arguments, do_sample=do_sample)
        expected = one_by_one(llama, texts, settings, seeds)
        before = copy.deepcopy(settings)
        for company in (batching(), batching(num_blocks=7, max_batch_tokens=16)):
            got = texts_of(generate_batch(llama, texts, settings, company, seed=seeds))
            assert got == expected, arguments
        assert settings.to_dict() == before.to_dict(), "the caller's own"
        changed += expected != plain
    assert changed >= len(DRAWN if do_sample else GREEDY) - 2


def test_end_tokens_of_a_request_are_those_of_its_processors(llama: Any) -> None:
    settings = settings_of({"min_new_tokens": 12, "repetition_penalty": 1.2}, do_sample=False)
    manager = BatchingManager(llama, settings, batching())
    manager.start()
    try:
        texts, ends = prompts(2), [END, 24]
        for text, end in zip(texts, ends, strict=True):
            manager.add_request(text, f"ends {end}", eos_token_id=end)
        found = [manager.get_result(timeout=60) for _ in texts]
    finally:
        manager.stop(block=True)
    got = {output.request_id: output.generated_tokens for output in found if output is not None}
    for text, end in zip(texts, ends, strict=True):
        settings.update(eos_token_id=end)
        assert [got[f"ends {end}"]] == one_by_one(llama, [text], settings)


def test_several_texts_of_a_prompt_have_the_processors(llama: Any) -> None:
    settings = settings_of({"no_repeat_ngram_size": 1, "num_return_sequences": 3}, do_sample=True)
    got = texts_of(generate_batch(llama, prompts(2), settings, batching(), seed=3))
    assert len(got) == 6 and len(set(map(tuple, got))) == 6
    assert all(len(set(text)) == len(text) for text in got)


def test_options_may_be_arguments(llama: Any) -> None:
    texts = prompts(3)
    given = {"repetition_penalty": 1.7, "max_new_tokens": 7}
    got = generate_batch(llama, texts, config(do_sample=False), batching(), **given)
    expected = one_by_one(llama, texts, settings_of({"eos_token_id": 2, **given}, do_sample=False))
    assert texts_of(got) == expected


@pytest.mark.parametrize("name", options.REFUSED)
def test_what_a_request_cannot_have_is_refused(llama: Any, name: str) -> None:
    before = llama.config._attn_implementation
    settings = config(do_sample=False)
    setattr(settings, name, 2)
    for call in (generate_batch, lambda *given: BatchingManager(given[0], *given[2:])):
        with pytest.raises(ValueError, match=f"{name} is 2; expected none"):
            call(llama, prompts(1), settings, batching())
        assert llama.config._attn_implementation == before


def test_every_option_of_transformers_is_known() -> None:
    """An option of a later release is refused where it is set, until it is in one of the lists."""
    kinds = [options.OF_REQUESTS, options.OF_PROCESSORS, options.WITHOUT_EFFECT, {*options.REFUSED}]
    known: set[str] = set().union(*kinds)
    assert sum(map(len, kinds)) == len(known)
    assert {name for name in vars(GenerationConfig()) if name not in known} == set()

    class LaterConfig(GenerationConfig):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.option_to_come = given.get("option_to_come")

    options.checked_config("call", LaterConfig(attribute_of_a_checkpoint=0.5))
    with pytest.raises(ValueError, match="option_to_come is True; expected none"):
        options.checked_config("call", LaterConfig(option_to_come=True))


@pytest.mark.parametrize(
    ("texts", "arguments", "error", "message"),
    [
        ([[5], []], {}, ValueError, "a prompt is empty"),
        ([[5, 6]], {"max_length": 2, "max_new_tokens": None}, ValueError,
         "max_length less 2 .* is 0"),
        ([[5]], {"logits_processor": []}, TypeError, "logits_processor is given, which is no argu"),
        ([[5]], {"new_tokens": 3}, TypeError, "new_tokens is given"),
        ([[5], [10**6]], {}, RuntimeError, "of 2 requests failed, the first with req_.*index out"),
        ([[5] * 2000], {}, RuntimeError, "1 of 1 requests failed, the first with req_0: No reques"),
    ],
)  # fmt: skip
def test_an_error_is_no_empty_list(
    llama: Any, texts: list[list[int]], arguments: dict[str, Any], error: Any, message: str
) -> None:
    before = llama.config._attn_implementation
    with pytest.raises(error, match=message):
        generate_batch(llama, texts, config(do_sample=False), batching(), **arguments)
    assert llama.config._attn_implementation == before
    assert texts_of(generate_batch(llama, [], config(do_sample=False), batching())) == []


def test_a_processor_that_fails_is_an_error(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no scores today")

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", fail)
    settings = settings_of({"repetition_penalty": 1.7}, do_sample=False)
    with pytest.raises(RuntimeError, match=r"2 of 2 requests failed.*no scores today"):
        generate_batch(llama, prompts(2), settings, batching())
