"""Whisper's rules of timestamps in the loop in C++."""

import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import lmdecode
from lmdecode.beam.rule_arguments import RuleArguments
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import ALWAYS, one_slot, repeat_token_rules
from lmdecode.decoder.device_loop import DeviceDecoder
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.readers.transformers.encoder_decoder import decoder_of
from lmdecode.reference.decoder import timestamp_rule
from tests.decoder.random_decoder import random_decoder
from tests.decoder.whisper_models import (
    END,
    FIRST_TIMESTAMP,
    audio,
    extractor,
    long_audio,
    short_audio,
    whisper_pair,
)

SEARCHES: list[dict[str, Any]] = [{}, {"num_beams": 4}]
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.3},
    {"sequence_bias": {(FIRST_TIMESTAMP + 7,): 9.0, (300,): 4.0}},
    {"suppress_tokens": None, "begin_suppress_tokens": None},
    {"min_new_tokens": 12},
]


@pytest.fixture
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call a function in which transformers' own processor must not be called."""

    def call(function: Any, *args: Any, **options: Any) -> Any:
        def fail(*_: Any) -> None:
            raise AssertionError("the processor was called")

        with monkeypatch.context() as patch:
            patch.setattr(WhisperTimeStampLogitsProcessor, "__call__", fail)
            return function(*args, **options)

    return call


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams"])
@pytest.mark.parametrize("processors", PROCESSORS, ids=lambda p: "+".join(p) or "none")
def test_tokens_are_those_of_generate(
    processors: dict[str, Any], search: dict[str, Any], in_cpp: Any
) -> None:
    found = set()
    for seed in range(2):
        model, decoding = whisper_pair(seed)
        arguments = {**short_audio(seed=seed), **search, **processors, "language": "en"}
        expected = model.generate(**arguments, return_timestamps=True)
        got = in_cpp(decoding.generate, **arguments, return_timestamps=True)
        assert got.tolist() == expected.tolist()
        found |= set(got.flatten().tolist())
        assert (got[:, 0] >= FIRST_TIMESTAMP).all()
    assert len({token for token in found if token >= FIRST_TIMESTAMP}) > 3
    assert len({token for token in found if token < END}) > 3


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams"])
def test_long_audio(search: dict[str, Any], in_cpp: Any) -> None:
    for seed in range(2):
        model, decoding = whisper_pair(seed)
        arguments = {**long_audio(7.3, 4.1, 5.6, seed=seed), **search, "language": "de"}
        expected = model.generate(**arguments, return_segments=True)
        got = in_cpp(decoding.generate, **arguments, return_segments=True)
        assert got["sequences"].tolist() == expected["sequences"].tolist()
        for ours, theirs in zip(got["segments"], expected["segments"], strict=True):
            assert len(ours) == len(theirs) > 2
            for one, other in zip(ours, theirs, strict=True):
                assert one["tokens"].tolist() == other["tokens"].tolist()
                assert (float(one["start"]), float(one["end"])) == (
                    float(other["start"]), float(other["end"])
                )  # fmt: skip


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_single_audio_and_the_first_time(num_beams: int, in_cpp: Any) -> None:
    model, decoding = whisper_pair(1)
    features = extractor()([audio(1.2, 5)], sampling_rate=16_000, return_tensors="pt")
    for last in (None, 0, 3, 10_000):
        config = model.generation_config
        before = config.max_initial_timestamp_index
        config.max_initial_timestamp_index = last
        try:
            arguments = dict(**features, num_beams=num_beams, language="fr", return_timestamps=True)
            expected = model.generate(**arguments)
            got = in_cpp(decoding.generate, **arguments)
        finally:
            config.max_initial_timestamp_index = before
        assert got.tolist() == expected.tolist()
        if last == 0:
            assert int(got[0, 0]) == FIRST_TIMESTAMP


@pytest.mark.parametrize("num_beams", [1, 3])
def test_processors_behind_the_rule_are_called(num_beams: int) -> None:
    """They see what it leaves; each step then returns to Python."""
    model, decoding = whisper_pair(0)
    arguments = dict(
        **short_audio(),
        num_beams=num_beams,
        language="en",
        return_timestamps=True,
        logits_processor=LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    )
    expected = model.generate(**arguments)
    assert decoding.generate(**arguments).tolist() == expected.tolist()


def _one_step(
    greedy: bool, rules: dict[str, Any], timestamps: tuple[int, int, int, int], seed: int
) -> None:
    """Compare the candidates of a step with those of the reference's rules."""
    config, weights = random_decoder("post_norm")
    decoder = lmdecode.Decoding(config, weights).decoder
    generator = torch.Generator().manual_seed(seed)
    slots, beams, length, capacity, source = 5, 1 if greedy else 2, 6, 8, 3
    vocab = config.vocab_size
    state = new_beam_state(slots, beams, capacity, keep_beam_indices=False)
    parameters = beam_parameters(
        slots, beams, prompt_lengths=1, max_lengths=capacity, end_tokens=[], pad_tokens=0
    )
    prompt = torch.randint(0, vocab, (slots, beams, length), generator=generator)
    prompt[:, 1:] = prompt[:, :1]  # beams have a prompt in common
    state.sequences[:, :, :length] = prompt
    state.lengths.fill_(length)
    if not greedy:
        state.scores[:, 1:] = -1e9
    bans = rules.pop("bans", ())
    token_rules = repeat_token_rules(one_slot(bans=bans, timestamps=timestamps, **rules), slots)
    token_rules.timestamps[-1, 0] = -1  # of the last slot it is off
    searches = DecodingSearches(
        decoder, state, parameters, token_rules, source,
        num_candidates=2 * beams, greedy=greedy,
    )  # fmt: skip
    memory = torch.randn(slots, source, config.memory_size, generator=generator)
    lengths = torch.full((slots,), source)
    searches.read_memory(memory, lengths, torch.arange(slots))
    logits = torch.zeros(slots * beams, vocab)
    searches.run(1, logits=logits)
    rows, sequences = logits[::beams], prompt[:, 0]
    values = rows if greedy else rows.log_softmax(-1)
    arguments = RuleArguments(one_slot(bans=bans, **rules)).of_length(length, sequences)
    ruled = values.clone()
    if "bias" in arguments:
        ruled = ruled + arguments["bias"]
    if "repetition_penalty" in arguments:
        penalty = arguments["repetition_penalty"]
        for row, sequence in zip(ruled, sequences, strict=True):
            seen = sequence.unique()
            row[seen] = torch.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    ruled[:, [ban[0] for ban in bans]] = -torch.inf
    expected = torch.cat([timestamp_rule(ruled, sequences, *timestamps)[:-1], ruled[-1:]])
    chosen = state.sequences[:, 0, length]
    assert chosen.tolist() == expected.argmax(-1).tolist()
    if not greedy:
        best = torch.where(expected > -torch.inf, expected, -torch.inf).topk(2).indices
        kept = state.sequences[:, :, length]
        for slot in range(slots):
            if math.isfinite(float(expected[slot][best[slot, 1]])):
                assert kept[slot].tolist() == best[slot].tolist()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "beams"])
def test_a_step_is_that_of_the_reference(greedy: bool) -> None:
    for seed in range(40):
        first = 20 + seed % 11
        end = first - 1 - seed % 4
        begin = (6, 5, 4, 2, 1, 0)[seed % 6]
        last = (-1, first, first + 3)[seed % 3]
        rules: dict[str, Any] = {}
        if seed % 2:
            rules["bans"] = [(token, 0, ALWAYS, 0) for token in (3, 9, first + 2)]
        if seed % 4 == 2:
            rules["repetition_penalty"] = 1.4
        if seed % 5 == 3:
            rules["bias"] = torch.linspace(-1, 1, 40)
        _one_step(greedy, rules, (first, end, begin, last), seed)


def test_other_loops_refuse_them() -> None:
    with pytest.raises(ValueError, match="timestamps are on; expected -1"):
        RuleArguments(one_slot(timestamps=(30, 20, 4, -1)))
    model, _ = whisper_pair(0)
    on_device = lmdecode.Decoding.from_pretrained(model)
    on_device.decoder = DeviceDecoder(*decoder_of(model))
    with pytest.raises(ValueError, match="WhisperTimeStampLogitsProcessor is nothing"):
        on_device.generate(**short_audio(), language="en", return_timestamps=True)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("processors", PROCESSORS, ids=lambda p: "+".join(p) or "none")
def test_scores_come_from_cpp(processors: dict[str, Any], num_beams: int, in_cpp: Any) -> None:
    """What the rules made of each step's logits, -inf where they forbid a token."""
    model, decoding = whisper_pair(1)
    arguments: dict[str, Any] = {
        **short_audio(), **processors, "language": "en", "num_beams": num_beams,
        "return_timestamps": True, "return_dict_in_generate": True, "output_scores": True,
        "output_logits": True, "force_unique_generate_call": True,
    }  # fmt: skip
    expected = model.generate(**arguments)
    got = in_cpp(decoding.generate, **arguments)
    assert got["sequences"].tolist() == expected["sequences"].tolist()
    for name in ("scores", "logits"):
        for ours, theirs in zip(got[name], expected[name], strict=True):
            goes_on = (ours != 0).any(-1)
            assert goes_on.any()
            torch.testing.assert_close(ours[goes_on], theirs[goes_on], atol=1e-3, rtol=1e-4)
