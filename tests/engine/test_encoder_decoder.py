"""``Engine`` of encoder-decoder models: texts of ``generate()``, in any company; what fails."""

from __future__ import annotations

import asyncio
import copy
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode import BeamRequest, Engine
from lmdecode.decoder.searches import DecodingSearches
from tests.decoder.decoder_models import END, PAD, VOCAB, make_inputs, make_model
from tests.engine.engine_cases import (
    OddTokens,
    check_interrupts,
    check_step_fails,
    is_whole,
    live_of,
    outcome,
    run,
)

pytest.importorskip("transformers")
from transformers import GenerationConfig

KINDS = ["bart", "t5", "m2m_100"]
NEW = 20


def decoding_of(kind: str) -> lmdecode.Decoding:
    model = make_model(kind)
    model.generation_config.forced_eos_token_id = None
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    return lmdecode.Decoding.from_pretrained(model)


@pytest.fixture(scope="module", params=KINDS)
def decoding(request: pytest.FixtureRequest) -> lmdecode.Decoding:
    return decoding_of(request.param)


@pytest.fixture(scope="module")
def bart() -> lmdecode.Decoding:
    return decoding_of("bart")


def engine_of(decoding: lmdecode.Decoding, max_requests: int = 4, **options: Any) -> Engine:
    return decoding.engine(max_requests=max_requests, **{"capacity": 40, "source": 24, **options})


def source_of(seed: int, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator)


SOURCES = [source_of(length, length) for length in (3, 20, 9, 1, 24, 16, 12, 5)]
KINDS_OF_REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"do_sample": False}),
    ({"seed": 7}, {"do_sample": True, "top_k": 0, "seed": 7}),
    ({"seed": 1, "temperature": 1.4, "top_k": 9, "top_p": 0.9},
     {"do_sample": True, "seed": 1, "temperature": 1.4, "top_k": 9, "top_p": 0.9}),
    ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_tokens": 9},
     {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 9}),
    ({"num_beams": 4}, {"num_beams": 4}),
    ({"num_beams": 3, "length_penalty": 0.3, "early_stopping": True, "min_tokens": 4},
     {"num_beams": 3, "length_penalty": 0.3, "early_stopping": True, "min_new_tokens": 4}),
    ({"num_beams": 4, "forced_bos_token_id": 9, "forced_eos_token_id": END},
     {"num_beams": 4, "forced_bos_token_id": 9, "forced_eos_token_id": END}),
]  # fmt: skip
IDS = ["greedy", "drawn", "filters", "rules", "beams", "beams that stop", "forced tokens"]


def generated(decoding: lmdecode.Decoding, prompt: list[int] | None = None, **options: Any) -> Any:
    """Return the text of ``generate()``, without its prompt and what fills it up."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [END, 5], **options}
    if prompt is not None:
        options["decoder_input_ids"] = torch.tensor([prompt])
    tokens = decoding.generate(pad_token_id=PAD, **options)[0].tolist()[len(prompt or [0]) :]
    ends = [place for place, token in enumerate(tokens) if token in (END, 5)]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize(("options", "of_generate"), KINDS_OF_REQUESTS, ids=IDS)
def test_the_text_of_generate(
    decoding: lmdecode.Decoding, options: dict[str, Any], of_generate: dict[str, Any]
) -> None:
    engine = engine_of(decoding, max_requests=3)
    start = decoding.model.generation_config.decoder_start_token_id
    requests = []
    for source in SOURCES:  # more than places, and of any length
        for prompt in (None, [start, 8, 30, 11]):
            wanted = generated(decoding, prompt, inputs=source[None], **of_generate)
            request = engine.submit(
                prompt, input_ids=source, max_new_tokens=NEW, eos_token_id=[END, 5], **options
            )
            requests.append((request, wanted))
        engine.step()
    for request, wanted in requests:
        assert list(request) == wanted == request.result().tokens
        assert request.finish_reason == ("stop" if wanted[-1] in (END, 5) else "length")
    assert is_whole(engine)


CONFIGS: list[dict[str, Any]] = [
    {"num_beams": 1},
    {"num_beams": 1, "bad_words_ids": [[14], [15]], "min_length": 6, "forced_eos_token_id": END},
    {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "suppress_tokens": [9]},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "+".join(config))
def test_a_generation_config(decoding: lmdecode.Decoding, config: dict[str, Any]) -> None:
    given = GenerationConfig(**config)
    engine = engine_of(decoding)
    requests = [
        engine.submit(input_ids=source, generation_config=given, max_new_tokens=NEW)
        for source in SOURCES
    ]
    for request, source in zip(requests, SOURCES, strict=True):
        found = decoding.generate(source[None], generation_config=given, max_new_tokens=NEW)
        tokens = request.result().tokens
        assert found[0, 1:].tolist()[: len(tokens)] == tokens
        assert set(found[0, 1 + len(tokens) :].tolist()) <= {PAD}
    assert given.max_new_tokens is None and is_whole(engine)


def test_a_search_that_is_given(decoding: lmdecode.Decoding) -> None:
    engine = engine_of(decoding, max_requests=2)
    search = BeamRequest([END], num_beams=4, max_new_tokens=NEW, eos_token_id=[END, 5])
    requests = [engine.submit_search(search, input_ids=source) for source in SOURCES]
    for request, source in zip(requests, SOURCES, strict=True):
        wanted = alone(
            decoding, prompt_ids=[END], input_ids=source, num_beams=4, max_new_tokens=NEW,
            eos_token_id=[END, 5],
        )  # fmt: skip
        assert outcome(request.result()) == outcome(wanted)
    with pytest.raises(ValueError, match="nothing is given as input; expected one of"):
        engine.submit_search(search)
    assert is_whole(engine)


def test_the_features_of_whisper() -> None:
    decoding = decoding_of("whisper")
    features = make_inputs("whisper")["input_features"]
    engine = decoding.engine(max_requests=2, capacity=40)
    requests = [
        (engine.submit([END], input_features=given, max_new_tokens=12, **options), i, options)
        for i, given in enumerate((features[0], features[1].numpy(), features[2]))
        for options in ({}, {"num_beams": 3}, {"seed": 3})
    ]
    for request, i, options in requests:
        sampled = {"temperature": 1.0, "top_k": 0} if "seed" in options else {}
        wanted = decoding.generate(features[i : i + 1], max_new_tokens=12, **options, **sampled)
        tokens = request.result().tokens  # Whisper's have no end token
        assert tokens[: len(tokens) - (tokens[-1] == END)] == wanted[0].tolist()
    assert is_whole(engine)


def test_a_memory_is_what_the_encoder_gives(bart: lmdecode.Decoding) -> None:
    source = SOURCES[1]
    memory = bart.encoder.memory_of_tokens(source.tolist())
    engine = engine_of(bart)
    first = engine.submit(input_ids=source, max_new_tokens=NEW)
    second = engine.submit(memory=memory, max_new_tokens=NEW)
    wanted = memory.clone()
    memory.zero_()  # its owner goes on with it
    assert first.result().tokens == second.result().tokens
    without = lmdecode.Decoding.from_pretrained(make_model("bart"))
    without.encoder = None
    third = engine_of(without).submit(memory=wanted, max_new_tokens=NEW)
    assert third.result().tokens == first.result().tokens


def alone(decoding: lmdecode.Decoding, **arguments: Any) -> Any:
    engine = decoding.engine(max_requests=1, capacity=96, source=64)
    return engine.submit(**arguments).result()


def arguments_of(rng: random.Random) -> dict[str, Any]:
    """Return the arguments of a request, of any kind, that say all: they may be given twice."""
    options, _ = rng.choice(KINDS_OF_REQUESTS)
    options = options or {"seed": 3, "logprobs": rng.randrange(4), "frequency_penalty": 0.5}
    prompt = rng.choice([None, [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]])
    source = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 25))]
    new = rng.randrange(1, 30)
    return {**options, "prompt_ids": prompt, "input_ids": source, "max_new_tokens": new,
            "eos_token_id": [END, 5, 9]}  # fmt: skip


def live(decoding: lmdecode.Decoding, seed: int) -> None:
    rng = random.Random(seed)
    engine = engine_of(
        decoding, max_requests=rng.choice([2, 5]), max_step_tokens=rng.choice([8, 50])
    )
    live_of(engine, rng, lambda: arguments_of(rng), lambda given: alone(decoding, **given))


@pytest.mark.parametrize("seed", range(4))
def test_lives_of_an_engine(decoding: lmdecode.Decoding, seed: int) -> None:
    live(decoding, seed)


def test_long_inputs_are_encoded_one_a_step(bart: lmdecode.Decoding) -> None:
    engine = engine_of(bart, max_step_tokens=24)
    requests = [
        engine.submit(input_ids=source_of(i, length), max_new_tokens=9, eos_token_id=())
        for i, length in enumerate((20, 20, 4, 4))
    ]
    counts = []
    for _ in range(3):
        engine.step()
        counts.append([request.stats.new_tokens for request in requests])
    assert counts == [[1, 0, 0, 0], [2, 1, 1, 0], [3, 2, 2, 1]]
    run(engine, *requests)
    assert engine.stats.steps == 11 and is_whole(engine)


def test_threads_and_coroutines(bart: lmdecode.Decoding) -> None:
    wanted = [generated(bart, inputs=source[None], eos_token_id=[END]) for source in SOURCES]
    engine = engine_of(bart, max_requests=3)

    def read(source: Tensor) -> list[Any]:
        return list(engine.submit(input_ids=source, max_new_tokens=NEW))

    async def read_async(source: Tensor) -> list[Any]:
        return [token async for token in engine.submit(input_ids=source, max_new_tokens=NEW)]

    async def read_all() -> list[list[Any]]:
        return await asyncio.gather(*map(read_async, SOURCES))

    for is_started in (False, True):
        if is_started:
            engine.start()
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, SOURCES)) == wanted
        assert asyncio.run(read_all()) == wanted
    engine.stop()
    assert is_whole(engine)


def test_who_is_cancelled(bart: lmdecode.Decoding) -> None:
    engine = engine_of(bart, max_requests=2, max_step_tokens=8)
    given = {"max_new_tokens": 30, "eos_token_id": ()}
    beams = engine.submit(input_ids=SOURCES[1], **given, num_beams=4)
    greedy = engine.submit(input_ids=SOURCES[2], **given)
    waiting = engine.submit(input_ids=SOURCES[3], **given)
    engine.step()
    assert greedy.stats.new_tokens == 0 and engine.stats.running == 2  # it is not encoded
    greedy.cancel()
    engine.step()
    assert greedy.finish_reason == "cancelled" and waiting.stats.new_tokens == 1
    beams.cancel()
    last = engine.submit(input_ids=SOURCES[1], **given, num_beams=4)
    engine.step()
    assert beams.finish_reason == "cancelled" and engine.stats.running == 2
    for request, source, options in ((waiting, 3, {}), (last, 1, {"num_beams": 4})):
        assert outcome(request.result()) == outcome(
            alone(bart, input_ids=SOURCES[source], **given, **options)
        )
    assert is_whole(engine)


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"num_beams": 3}])
def test_nan_ends_its_request_alone(bart: lmdecode.Decoding, options: dict[str, Any]) -> None:
    engine = engine_of(bart, max_requests=2)
    memory = bart.encoder.memory_of_tokens(SOURCES[4].tolist())
    memory[5] = float("nan")
    fine = engine.submit(input_ids=SOURCES[1], max_new_tokens=9)
    bad = engine.submit(memory=memory, max_new_tokens=9, **options)
    run(engine, fine, bad)
    with pytest.raises(RuntimeError, match=r"no token can be chosen: the request has NaN"):
        bad.result()
    others = [engine.submit(input_ids=s, max_new_tokens=9, **options) for s in SOURCES[:3]]
    for request, source in zip(others, SOURCES, strict=False):  # in the place of the bad one, too
        wanted = alone(bart, input_ids=source, max_new_tokens=9, **options)
        assert outcome(request.result()) == outcome(wanted)
    assert outcome(fine.result()) == outcome(alone(bart, input_ids=SOURCES[1], max_new_tokens=9))
    assert is_whole(engine)


def test_an_encoder_that_fails(bart: lmdecode.Decoding) -> None:
    broken = copy.copy(bart)
    broken.encoder = copy.copy(bart.encoder)

    def fail(*_: Any) -> Any:
        raise LookupError("no such layer")

    engine = engine_of(broken, max_requests=2)
    fine = engine.submit(input_ids=SOURCES[1], max_new_tokens=9)
    engine.step()
    broken.encoder.memory_of_tokens = fail
    bad = engine.submit(input_ids=SOURCES[2], max_new_tokens=9)
    with pytest.raises(LookupError, match="no such layer"):
        bad.result()
    assert outcome(fine.result()) == outcome(alone(bart, input_ids=SOURCES[1], max_new_tokens=9))
    assert is_whole(engine)


def test_a_grammar_and_logprobs(bart: lmdecode.Decoding) -> None:
    engine = engine_of(bart)
    common = {"input_ids": SOURCES[2], "max_new_tokens": 8, "eos_token_id": ()}
    odd = engine.submit(grammar=OddTokens(), seed=1, logprobs=2, **common)
    stuck = engine.submit(grammar=OddTokens(ends_after=3), seed=1, **common)
    free = engine.submit(**common)
    run(engine, odd, stuck, free)
    assert [token % 2 for token in odd.result().tokens] == [0, 1] * 4
    assert [len(item.top) for item in odd.result().logprobs] == [2] * 8
    with pytest.raises(RuntimeError, match="no logit above -inf"):
        stuck.result()
    assert outcome(free.result()) == outcome(alone(bart, **common)) and is_whole(engine)


def test_a_step_that_fails_ends_those_that_run(
    bart: lmdecode.Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(bart, max_requests=2, max_step_tokens=8)
    requests = [
        engine.submit(input_ids=SOURCES[i], max_new_tokens=9, num_beams=n)
        for i, n in ((0, 1), (1, 3), (2, 2))
    ]
    engine.step()  # the second is not encoded yet
    check_step_fails(monkeypatch, engine, (DecodingSearches, "read_tokens"), requests[:2])
    assert outcome(requests[2].result()) == outcome(
        alone(bart, input_ids=SOURCES[2], max_new_tokens=9, num_beams=2)
    )
    assert is_whole(engine)


def test_an_interrupt_at_any_line_holds_no_place(
    bart: lmdecode.Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = [
        {"input_ids": SOURCES[i], "max_new_tokens": 4, "num_beams": beams}
        for i, beams in enumerate((1, 2))
    ]
    engine = engine_of(bart, max_requests=2)
    check_interrupts(
        monkeypatch,
        engine,
        lambda: [engine.submit(**arguments) for arguments in given],
        [outcome(alone(bart, **arguments)) for arguments in given],
    )


def test_an_engine_of_a_saved_model(bart: lmdecode.Decoding, tmp_path: Path) -> None:
    bart.save(tmp_path / "bart")
    engine = engine_of(lmdecode.Decoding.load(tmp_path / "bart"))
    request = engine.submit(input_ids=SOURCES[1], max_new_tokens=9)
    with torch.device("meta"):
        got = request.result()
    assert outcome(got) == outcome(alone(bart, input_ids=SOURCES[1], max_new_tokens=9))


def test_texts_as_long_as_the_capacity(decoding: lmdecode.Decoding) -> None:
    most = decoding.decoder.num_positions or 60
    more = [most + 1] if decoding.decoder.num_positions else []
    for capacity in more:
        with pytest.raises(ValueError, match=f"capacity is {capacity}; expected 1 to {most}"):
            engine_of(decoding, capacity=capacity)
    engine = engine_of(decoding, capacity=most)
    for options in ({}, {"num_beams": 3}):
        request = engine.submit(
            [END, 8], input_ids=SOURCES[0], max_new_tokens=most - 1, eos_token_id=(), **options
        )
        assert len(request.result().tokens) == most - 1
    with pytest.raises(ValueError, match=f"expected at most {most + 1} together"):
        engine.submit([END, 8], input_ids=SOURCES[0], max_new_tokens=most)
