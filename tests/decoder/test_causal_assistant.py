"""Decoding.generate(assistant_model=...): the text, and the bits, of calls without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

import lmdecode
from lmdecode.decoder.causal_caches import CausalCaches
from lmdecode.models.packed_causal import PackedCausalModel
from tests.support.causal_models import CASES, PAD, POSITIONS, VOCAB, random_model, random_tokens
from tests.support.drafts import counted, decoding_of, noisy, padded
from tests.support.releases import BEFORE_5_14
from tests.support.word_tokenizer import word_tokenizer

LLAMA = ("llama", "plain")
FEW = [LLAMA, ("gemma3_text", "plain"), ("lfm2", "convolutions at the ends")]
SURE: dict[str, Any] = {"assistant_confidence_threshold": 0.0}


def inputs(rows: int = 1) -> dict[str, torch.Tensor]:
    """Prompts, padded on the left."""
    ids = torch.full((rows, 24), PAD)
    for row, text in enumerate(ids):
        text[5 * row :] = random_tokens(24 - 5 * row, row)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


class Odd:
    """A processor of a user, which bans some tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = (torch.arange(scores.shape[1]) + input_ids.shape[1]) % 3 == 0
        return scores.masked_fill(banned, -torch.inf)


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_greedy_text_and_logits_are_the_same(architecture: str, variant: str) -> None:
    decoding, draft = decoding_of(architecture, variant), noisy(architecture, variant)
    options: dict[str, Any] = {
        "max_new_tokens": 30, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = decoding.generate(**inputs(2), **options)
    got = decoding.generate(**inputs(2), **options, **SURE, assistant_model=draft)
    assert got.sequences.equal(expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert ours.equal(theirs)
    text = decoding.generate(**inputs(2), max_new_tokens=30, assistant_model=draft)  # by an engine
    assert text.equal(expected.sequences)


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalties", "stop", "processor", "streamer"])
@pytest.mark.parametrize(("architecture", "variant"), FEW)
def test_every_way_to_choose(
    architecture: str, variant: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, draft = decoding_of(architecture, variant), noisy(architecture, variant)
    rows = 1 if kind == "streamer" else 3
    options: dict[str, Any] = {"max_new_tokens": 40, **inputs(rows)}
    if kind != "greedy":
        options |= {"do_sample": True, "top_k": 9, "temperature": 0.6, "seed": 5}
    if kind == "penalties":
        options |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9}
    elif kind == "stop":
        expected = decoding.generate(**options)
        tokenizer = word_tokenizer(VOCAB)
        options |= {"tokenizer": tokenizer, "stop_strings": tokenizer.decode(expected[0, 40])}
    elif kind == "processor":
        options["logits_processor"] = LogitsProcessorList([Odd(), TopKLogitsWarper(50)])  # type: ignore[list-item]
    streams = [Collected(), Collected()]
    if kind == "streamer":
        options["streamer"] = streams[0]
    expected = decoding.generate(**options)
    if kind == "streamer":
        options["streamer"] = streams[1]
    steps = counted(monkeypatch, decoding.decoder)
    got = decoding.generate(**options, assistant_model=draft, **SURE)
    assert got.equal(expected)
    assert max(steps[1:]) > 1 and (rows > 1 or len(steps) < 40)
    assert streams[0].tokens == streams[1].tokens
    assert streams[1].has_ended == (kind == "streamer")


def test_drafts_take_the_noise_of_the_text() -> None:
    """The model itself, as its own assistant, is right in every draw."""
    decoding = decoding_of(*LLAMA)
    options: dict[str, Any] = {
        "do_sample": True, "temperature": 1.3, "max_new_tokens": 41, "seed": 3,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    expected = decoding.generate(**inputs(), **options)
    small = lmdecode.Decoding.from_pretrained(random_model(*LLAMA))  # the same weights
    for more in ({}, {"streamer": Collected()}):
        with pytest.MonkeyPatch.context() as patch:
            steps = counted(patch, decoding.decoder)
            got = decoding.generate(**inputs(), **options, **SURE, **more, assistant_model=small)
        assert got.equal(expected)
        assert steps.count(6) == 6  # 36 of the tokens; the first one is the prompt's


def test_defaults_are_those_of_the_assistant() -> None:
    decoding, draft = decoding_of(*LLAMA), noisy(*LLAMA)
    assert draft.model is not decoding.model
    draft.model.generation_config.num_assistant_tokens = 0
    try:
        with pytest.raises(ValueError, match="num_assistant_tokens is 0; expected 1 to 1024"):
            decoding.generate(**inputs(), max_new_tokens=3, assistant_model=draft)
        got = decoding.generate(
            **inputs(), max_new_tokens=3, assistant_model=draft, num_assistant_tokens=2
        )
    finally:
        draft.model.generation_config.num_assistant_tokens = None
    assert got.equal(decoding.generate(**inputs(), max_new_tokens=3))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_other_formats(dtype: str) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model(*LLAMA), dtype, cache_dtype="int8")
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "top_k": 5, "seed": 1}
    expected = decoding.generate(**inputs(2), **options)
    got = decoding.generate(**inputs(2), **options, assistant_model=decoding_of(*LLAMA), **SURE)
    assert got.equal(expected)


def test_a_padding_token_outside_the_vocabulary() -> None:
    decoding = decoding_of(*LLAMA)
    text = decoding.generate(**inputs(2), max_new_tokens=20)
    options: dict[str, Any] = {
        "max_new_tokens": 20, "eos_token_id": int(text[0, 30]), "pad_token_id": PAD,
        "return_dict_in_generate": True,
    }  # fmt: skip
    expected = decoding.generate(**inputs(2), **options).sequences
    got = decoding.generate(**inputs(2), **options, assistant_model=noisy(*LLAMA), **SURE)
    assert got.sequences.equal(expected)


@pytest.mark.parametrize(("architecture", "variant"), FEW[:2])
def test_with_a_store(architecture: str, variant: str, tmp_path: Path) -> None:
    store_of = pytest.importorskip("lmdecode.store")
    decoding, draft = decoding_of(architecture, variant), noisy(architecture, variant)
    ids, options = random_tokens(60)[None], {"max_new_tokens": 40, **SURE}
    expected = decoding.generate(ids, max_new_tokens=40)
    with store_of.KVStore(
        tmp_path, fingerprint=decoding.fingerprint(), capacity_bytes=1 << 26
    ) as store:
        for _ in range(2):  # the second time, the prompt is loaded
            of_session = {"store": store, "session": "a", "rewind": True}
            got = decoding.generate(ids, **options, **of_session, assistant_model=draft)
            assert got.equal(expected)
        engine = decoding.engine(
            max_requests=1, capacity=120, store=store, assistant_model=draft, **SURE
        )
        tokens = engine.submit(ids[0], max_new_tokens=40).result().tokens
        assert tokens == expected[0, 60:].tolist()
        assert engine.stats.cached_tokens > 0 < engine.stats.accepted_tokens


@pytest.mark.parametrize("vocab", [VOCAB - 1, VOCAB + 1])
@pytest.mark.parametrize(("architecture", "variant"), FEW)
def test_a_vocabulary_with_other_padding(
    architecture: str, variant: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights draft what the model chooses, whichever tokens only one of them has."""
    decoding, draft = decoding_of(architecture, variant), padded(architecture, variant, vocab)
    model = decoding.model.config.get_text_config()
    assert draft.decoder.config.vocab_size == vocab != model.vocab_size == VOCAB
    for options in ({}, {"do_sample": True, "temperature": 1.3, "seed": 3}):
        options = {**inputs(), "max_new_tokens": 41, **options}
        if vocab < VOCAB:
            options["suppress_tokens"] = [VOCAB - 1]
        expected = decoding.generate(**options)
        with monkeypatch.context() as patch:
            steps = counted(patch, decoding.decoder)
            got = decoding.generate(**options, assistant_model=draft, **SURE)
        assert got.equal(expected)
        assert steps.count(6) == 6  # 36 of the tokens, as without padding


@pytest.mark.parametrize("place", ["prompt", "text"])
def test_a_token_that_the_assistant_does_not_have(place: str) -> None:
    decoding, draft = decoding_of(*LLAMA), padded(*LLAMA, VOCAB - 1)
    of, odd = inputs(2), VOCAB - 1
    if place == "prompt":
        of["input_ids"][0, 7] = odd
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 2, **of}
    if place == "text":
        options["sequence_bias"] = {(odd,): 4.0}
    expected = decoding.generate(**options)
    if place == "text":
        assert (expected[:, 24:] == odd).any(1).all()
    for more in ({}, {"return_dict_in_generate": True, "output_logits": True}):
        got = decoding.generate(**options, **more, assistant_model=draft, **SURE)
        assert (got if isinstance(got, torch.Tensor) else got.sequences).equal(expected)


def test_tokenizers_tell_that_tokens_are_the_same() -> None:
    decoding, draft = decoding_of(*LLAMA), padded(*LLAMA, 60)
    known, other = word_tokenizer(60), word_tokenizer(59)
    expected = decoding.generate(**inputs(2), max_new_tokens=30)
    with pytest.raises(ValueError, match="has a vocabulary of 60 tokens; expected 101, that of"):
        decoding.generate(**inputs(2), max_new_tokens=30, assistant_model=draft)
    options: dict[str, Any] = {"max_new_tokens": 30, "assistant_model": draft, **inputs(2)}
    got = decoding.generate(**options, tokenizer=known, assistant_tokenizer=word_tokenizer(60))
    assert got.equal(expected)
    for wrong in (
        {"tokenizer": known, "assistant_tokenizer": other},
        {"assistant_tokenizer": known},
    ):
        with pytest.raises(ValueError, match=r"^assistant_tokenizer: expected None, a mod"):
            decoding.generate(**options, **wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "^assistant_model: expected None with beams"),
        ({"prompt_lookup_num_tokens": 2}, "^prompt_lookup_num_tokens: expected None, an assist"),
        ({"assistant_tokenizer": "x"}, "^assistant_tokenizer: expected None"),
        pytest.param(
            {"assistant_ensemble_weight": 0.5},
            "^assistant_ensemble_weight: expected None",
            marks=pytest.mark.skipif(BEFORE_5_14, reason="transformers before 5.14 lacks it"),
        ),
        ({"num_assistant_tokens_schedule": "heuristic"}, "_schedule is 'heuristic'; expected"),
        ({"num_assistant_tokens": -1}, "num_assistant_tokens is -1"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoding_of(*LLAMA).generate(
            **inputs(), max_new_tokens=4, assistant_model=noisy(*LLAMA), **arguments
        )


def test_the_packed_model_is_no_assistant() -> None:
    packed = decoding_of(*LLAMA).decoder
    assert isinstance(packed, PackedCausalModel)
    with pytest.raises(TypeError, match="assistant_model is of type PackedCausalModel; expected"):
        decoding_of(*LLAMA).generate(**inputs(), max_new_tokens=4, assistant_model=packed)


MODEL = Path(__file__).parents[2] / "examples" / "kjv_mistral" / "model"
FEW_REPEATED = (("gemma3_text", "plain"), ("mistral", "window"), ("gpt2", "plain"))


def repetitive(rows: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of phrases that come again, padded on the left."""
    ids = torch.full((rows, 28), PAD)
    for row, text in enumerate(ids):
        phrase = random_tokens(6 - row % 3, row)
        text[4 * row :] = phrase.repeat(9)[: 28 - 4 * row]
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def counted_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the tokens of each step from here on."""
    steps: list[int] = []
    forward = CausalCaches.forward

    def count(
        self: CausalCaches, tokens: Any, entries: Any, num_logits: int, **options: Any
    ) -> Any:
        steps.append(len(tokens))
        return forward(self, tokens, entries, num_logits, **options)

    monkeypatch.setattr(CausalCaches, "forward", count)
    return steps


@pytest.mark.parametrize(("architecture", "variant"), CASES)
def test_greedy_text_and_logits_with_lookup_are_the_same(architecture: str, variant: str) -> None:
    decoding = decoding_of(architecture, variant)
    options: dict[str, Any] = {
        "max_new_tokens": 40, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    inputs = repetitive(3)
    expected = decoding.generate(**inputs, **options)
    for num_tokens in (1, 7):
        got = decoding.generate(**inputs, **options, prompt_lookup_num_tokens=num_tokens)
        assert got.sequences.equal(expected.sequences)
        for ours, theirs in zip(got.logits, expected.logits, strict=True):
            assert ours.equal(theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("architecture", "variant"), FEW_REPEATED)
def test_sampled_text_is_the_same(architecture: str, variant: str, dtype: str) -> None:
    decoding = decoding_of(architecture, variant, dtype=dtype, cache_dtype="int8")
    options: dict[str, Any] = {
        "max_new_tokens": 60, "do_sample": True, "top_k": 3, "temperature": 0.6, "seed": 5,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    inputs = repetitive(2)
    got = decoding.generate(
        **inputs, **options, prompt_lookup_num_tokens=5, max_matching_ngram_size=3
    )
    assert got.equal(decoding.generate(**inputs, **options))


def test_text_that_comes_again_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    decoding = lmdecode.Decoding.from_pretrained(model)
    inputs = tokenizer("And he said. And he said. And he said.", return_tensors="pt")
    expected = decoding.generate(**inputs, max_new_tokens=64, do_sample=False)
    plain = expected.shape[1] - inputs.input_ids.shape[1]  # steps of a token
    steps = counted_tokens(monkeypatch)
    got = decoding.generate(
        **inputs, max_new_tokens=64, do_sample=False, prompt_lookup_num_tokens=8
    )
    assert got.equal(expected)
    assert got.equal(model.generate(**inputs, max_new_tokens=64, do_sample=False))
    assert 1 < max(steps[1:]) <= 9 and len(steps) < plain


def test_nothing_is_read_beyond_the_longest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = decoding_of("llama", "plain")
    steps = counted_tokens(monkeypatch)
    inputs = repetitive()
    for new in (1, 2, 5):
        expected = decoding.generate(**inputs, max_new_tokens=new)
        steps.clear()
        got = decoding.generate(**inputs, max_new_tokens=new, prompt_lookup_num_tokens=1 << 40)
        assert got.equal(expected)
        assert sum(steps[1:]) < new


def test_all_positions_of_a_model() -> None:
    decoding = decoding_of("gpt2", "plain")
    options = {"max_length": POSITIONS + 1, "min_new_tokens": POSITIONS - 28}
    got = decoding.generate(**repetitive(), **options, prompt_lookup_num_tokens=9)
    assert got.shape[1] == POSITIONS + 1
    assert got.equal(decoding.generate(**repetitive(), **options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_lookup_num_tokens": 2, "num_beams": 2}, ": expected None with beams, got 2"),
        ({"prompt_lookup_num_tokens": 0}, " is 0; expected an int of 64 bits, at least 1"),
        ({"prompt_lookup_num_tokens": 1.5}, " is of type float"),
    ],
)
def test_bad_input_of_lookup(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"prompt_lookup_num_tokens{message}"):
        decoding_of("llama", "plain").generate(**repetitive(), max_new_tokens=4, **arguments)
