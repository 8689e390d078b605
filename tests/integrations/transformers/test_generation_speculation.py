"""Prompt lookup and assistants in ``sample`` give the text without them; models are float64."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lmdecode.integrations.transformers import DynamicRingCache, StaticRingCache, sample
from tests.support.releases import READS_DRAFTS
from tests.support.tiny_models import ENCODER_DECODER, VOCAB, build_model

MODEL = Path(__file__).parents[3] / "examples" / "kjv_mistral" / "model"
pytestmark = READS_DRAFTS
WINDOWED = ("gpt2", "llama", "mistral", "qwen2")
CONFIGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy rules": {
        "do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 4,
        "min_new_tokens": 30, "bad_words_ids": [[9], [17, 30]],
    },
    "temperature": {"temperature": 0.6},
    "top-k, top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "min-p": {"min_p": 0.1, "repetition_penalty": 1.05},
    "typical": {"typical_p": 0.7, "epsilon_cutoff": 0.001, "temperature": 0.8},
    "eta": {"eta_cutoff": 0.003, "suppress_tokens": [5, 11], "temperature": 0.9},
    "rules": {
        "temperature": 0.5, "top_k": 40, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3,
        "min_new_tokens": 25, "sequence_bias": {(40,): 2.0, (41, 42): 3.0},
    },
}  # fmt: skip


@functools.cache
def bible() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()


@functools.cache
def without_last_layer() -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    return model


def drafts(name: str) -> dict[str, Any]:
    if name == "lookup":
        return {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3}
    return {"assistant_model": without_last_layer()}


def phrases(rows: int = 1, vocab: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(5, vocab, (rows, 9), generator=generator).repeat(1, 3)


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Count the tokens of each forward pass of the model."""
    counts: list[int] = []
    handle = bible().register_forward_pre_hook(
        lambda _, __, inputs: counts.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    yield counts
    handle.remove()


def run(model: Any = None, ids: Any = None, **options: Any) -> Any:
    options = {
        "max_new_tokens": 40, "do_sample": True, "top_k": 0, "seed": 3, "custom_generate": sample,
    } | options  # fmt: skip
    ids = phrases() if ids is None else ids
    return (model or bible()).generate(ids, attention_mask=torch.ones_like(ids), **options)


@pytest.mark.parametrize("source", ["lookup", "assistant"])
@pytest.mark.parametrize("config", CONFIGS)
def test_text_is_that_without_drafts(reads, config, source):
    options = {**CONFIGS[config], "eos_token_id": [1, 300]}
    expected = run(**options)
    plain = len(reads)
    reads.clear()
    got = run(**options, **drafts(source))
    assert torch.equal(got, expected)
    assert max(reads[1:]) > 1 and len(reads) <= plain
    if source == "assistant":
        assert len(reads) < plain


@pytest.mark.parametrize("source", ["lookup", "assistant"])
def test_drafts_that_are_right_save_steps(reads, source):
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": None}
    ids = torch.cat([phrases(), run(**options)], dim=1)
    expected = run(ids=ids, **options)
    reads.clear()
    got = run(ids=ids, **options, **drafts(source))
    assert torch.equal(got, expected) and len(reads) < 45


@pytest.mark.parametrize("source", ["lookup", "assistant"])
def test_torchs_generator_gives_the_same_seed(source):
    torch.manual_seed(9)
    expected = run(seed=None, temperature=0.7)
    after = torch.rand(1)
    torch.manual_seed(9)
    assert torch.equal(run(seed=None, temperature=0.7, **drafts(source)), expected)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("source", ["lookup", "assistant"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_end_may_be_anywhere_among_the_drafts(do_sample, source):
    ids = torch.cat([phrases(), run(do_sample=False, eos_token_id=None)], dim=1)
    options = {"do_sample": do_sample, "temperature": 0.3}
    whole = run(ids=ids, eos_token_id=None, **options)[0, ids.shape[1] :].tolist()
    for token in dict.fromkeys(whole[:20]):
        expected = run(ids=ids, eos_token_id=[token], **options)
        assert expected.shape[1] == ids.shape[1] + whole.index(token) + 1
        assert torch.equal(
            run(ids=ids, eos_token_id=[token], **options, **drafts(source)), expected
        )


@pytest.mark.parametrize("source", ["lookup", "assistant"])
def test_no_more_is_read_than_there_is_room_for(reads, source):
    for new in (1, 2, 3, 7):
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
        expected = run(**options)
        reads.clear()
        assert torch.equal(run(**options, **drafts(source)), expected)
        length = phrases().shape[1]
        assert sum(reads[1:]) <= 6 * new and max(reads[1:], default=0) <= new
        assert reads[0] == length


class Stop(StoppingCriteria):
    """Stops behind a token that stands at an odd place; sees each length once."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids, scores, **options):
        self.lengths.append(input_ids.shape[1])
        stop = self.lengths[-1] % 2 == 1 and int(input_ids[0, -1]) % 4 == 1
        return torch.tensor([stop])


class Texts(LogitsProcessor):
    """Keeps the texts that it is called for, and changes what comes by what came."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, int(input_ids[0, -1]) % 7 :: 7] += 0.1 * len(self.seen)
        return scores


class Streamer:
    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = 0

    def put(self, value):
        self.given.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("source", ["lookup", "assistant"])
def test_criteria_processors_and_streamers_see_each_token(source):
    """Those of the user keep a state, and drafts that are refused would be in it."""
    seen = []
    for speculation in ({}, drafts(source)):
        stop, texts, streamer = Stop(), Texts(), Streamer()
        ids = run(
            stopping_criteria=StoppingCriteriaList([stop]),
            logits_processor=LogitsProcessorList([texts]),
            streamer=streamer,
            temperature=0.5,
            **speculation,
        )
        seen.append((ids.tolist(), stop.lengths, texts.seen, streamer.given, streamer.ended))
    assert seen[0] == seen[1]
    assert seen[1][-1] == 1 and len(seen[1][2]) > 2


@pytest.mark.parametrize("source", ["lookup", "assistant"])
@pytest.mark.parametrize("config", ["greedy", "rules"])
def test_what_the_dictionary_holds(config, source):
    options = {
        **CONFIGS[config], "return_dict_in_generate": True, "output_scores": True,
        "output_logits": True, "output_hidden_states": True, "output_attentions": True,
        "max_new_tokens": 30, "eos_token_id": None,
    }  # fmt: skip
    bible().set_attn_implementation("eager")
    try:
        expected = run(**options)
        got = run(**options, **drafts(source))
    finally:
        bible().set_attn_implementation("sdpa")
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for name in ("hidden_states", "attentions"):
        for ours, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    caches = got.past_key_values, expected.past_key_values
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("source", ["lookup", "assistant"])
def test_a_text_goes_on_in_the_cache(source):
    first = run(return_dict_in_generate=True, eos_token_id=None, **drafts(source))
    ids = torch.cat([first.sequences, phrases()], dim=1)
    expected = run(ids=ids, temperature=0.6)
    got = run(ids=ids, temperature=0.6, past_key_values=first.past_key_values, **drafts(source))
    assert torch.equal(got, expected)


def test_a_padded_prompt():
    ids = torch.cat([torch.full((1, 3), 2), phrases()], dim=1)
    mask = (ids != 2).long()
    for source in ("lookup", "assistant"):
        for config in ("greedy", "temperature", "rules"):
            options = {
                "max_new_tokens": 30, "do_sample": True, "seed": 3, "custom_generate": sample,
            }  # fmt: skip
            options |= {"attention_mask": mask, **CONFIGS[config]}
            expected = bible().generate(ids, **options)
            assert torch.equal(bible().generate(ids, **options, **drafts(source)), expected)


@pytest.mark.parametrize("cache", ["dynamic", "dynamic ring", "static ring"])
@pytest.mark.parametrize("name", WINDOWED)
def test_caches_let_go_of_drafts(name, cache):
    model = build_model(name, VOCAB, torch.float64)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        assistant.get_input_embeddings().weight.mul_(1.02)
    ids = phrases(vocab=VOCAB)
    caches = {
        "dynamic": lambda: None,
        "dynamic ring": lambda: DynamicRingCache(model.config),
        "static ring": lambda: StaticRingCache(model.config, 128),
    }
    for do_sample in (False, True):
        options = {"do_sample": do_sample, "temperature": 0.4, "max_new_tokens": 60}
        expected = run(model, ids, eos_token_id=None, **options)
        for speculation in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
            got = run(
                model, ids, eos_token_id=None, past_key_values=caches[cache](), **options,
                **speculation,
            )  # fmt: skip
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_encoder_decoder_models(name):
    model = build_model(name, VOCAB, torch.float64)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        assistant.lm_head.weight.mul_(1.05)
    ids = phrases(vocab=VOCAB)
    for do_sample in (False, True):
        options = {"do_sample": do_sample, "temperature": 0.6, "max_new_tokens": 50}
        expected = run(model, ids, **options)
        for speculation in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
            assert torch.equal(run(model, ids, **options, **speculation), expected)


def test_an_assistant_of_a_function_around_the_loop(reads):
    expected = run(temperature=0.6)
    plain = len(reads)
    reads.clear()
    loop = functools.partial(sample, assistant_model=without_last_layer())
    assert torch.equal(run(temperature=0.6, custom_generate=loop), expected)
    assert len(reads) < plain


def test_the_cache_is_left_as_it_would_be_after_an_error():
    class Fail(StoppingCriteria):
        def __call__(self, input_ids, scores, **options):
            if input_ids.shape[1] == phrases().shape[1] + 12:
                raise RuntimeError("enough")
            return torch.tensor([False])

    lengths = []
    for speculation in ({}, drafts("assistant")):
        cache = DynamicRingCache(bible().config)
        with pytest.raises(RuntimeError, match="enough"):
            run(stopping_criteria=[Fail()], past_key_values=cache, eos_token_id=None, **speculation)
        lengths.append(cache.get_seq_length())
    assert lengths[0] == lengths[1]


def test_bad_input():
    llama, gpt2 = (build_model(name, VOCAB, torch.float32) for name in ("llama", "gpt2"))
    other = build_model("llama", VOCAB + 1, torch.float32)
    ids = phrases(vocab=VOCAB)
    lookup: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    for options, message in (
        ({**lookup, "input_ids": ids.repeat(2, 1)}, "num_tokens: expected one sequence, got 2: "),
        ({**lookup, "use_cache": False}, "num_tokens: expected a cache of keys and values, got "),
        ({**lookup, "cache_implementation": "static"}, "let go of its last tokens, .* StaticCache"),
        ({**lookup, "synced_gpus": True}, "num_tokens: expected None with synced_gpus"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0; expected"),
        ({**lookup, "max_matching_ngram_size": 0}, "max_matching_ngram_size is 0; expected"),
        ({"assistant_model": other}, "^assistant_model: expected the vocabulary .* got 62$"),
        ({**lookup, "assistant_model": gpt2}, "^prompt_lookup_num_tokens: expected None, an assis"),
        (
            {"assistant_model": gpt2, "assistant_tokenizer": "t"},
            "^assistant_tokenizer: expected No",
        ),
        ({"assistant_model": gpt2, "assistant_ensemble_weight": 0.5}, "^assistant_ensemble_weight"),
        ({"assistant_early_exit": 1}, "^assistant_early_exit: expected None, this loop runs all"),
        ({"use_mtp": True}, "^use_mtp: expected None, this loop runs all"),
    ):
        streamer = Streamer()
        inputs = {"input_ids": ids, "max_new_tokens": 5, "pad_token_id": 0} | options
        if len(inputs["input_ids"]) == 1:
            inputs["streamer"] = streamer
        with pytest.raises(ValueError, match=message):
            llama.generate(**inputs, custom_generate=sample)
        assert streamer.ended == ("streamer" in inputs)
        assert len(streamer.given) == ("streamer" in inputs)  # the prompt, of generate()
    embeddings = llama.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match=r"^assistant_model: expected None for inputs_embeds"):
        llama.generate(inputs_embeds=embeddings, custom_generate=sample, assistant_model=gpt2)
    got = llama.generate(
        inputs_embeds=embeddings,
        custom_generate=sample,
        max_new_tokens=30,
        do_sample=False,
        **lookup,
    )
    expected = llama.generate(inputs_embeds=embeddings, max_new_tokens=30, do_sample=False)
    assert torch.equal(got, expected)
    bart = build_model("bart", VOCAB, torch.float32)
    around = functools.partial(sample, assistant_model=bart)
    with pytest.raises(ValueError, match=r"assistant_model: expected it as an argument of gener"):
        bart.generate(ids, custom_generate=lambda *a, **k: around(*a, **k))
