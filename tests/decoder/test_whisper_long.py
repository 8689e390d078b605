"""Whisper's long audio through Decoding.generate(): transformers' tokens, option by option."""

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, pipeline
from transformers.generation.logits_process import (
    WhisperNoSpeechDetection,
    WhisperTimeStampLogitsProcessor,
)
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.models.whisper.modeling_whisper import WhisperDecoder, WhisperEncoder

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
    NO_SPEECH,
    PREVIOUS,
    SECONDS,
    START,
    TASKS,
    audio,
    extractor,
    long_audio,
    make_whisper,
    short_audio,
    whisper_pair,
)
from tests.decoder.whisper_tokenizer import whisper_tokenizer
from tests.support.releases import BEFORE_5_1

PROMPT = torch.tensor([PREVIOUS, 300, 301, 77])
OPTIONS: list[dict[str, Any]] = [
    {"language": "en"},
    {"language": ["de", "en", "fr"]},
    {"language": None, "task": "translate"},
    {"language": "german", "task": "transcribe", "prompt_ids": PROMPT},
    {"language": "en", "condition_on_prev_tokens": True},
    {"language": "en", "condition_on_prev_tokens": True, "repetition_penalty": 1.2},
    {"language": "en", "condition_on_prev_tokens": True, "no_repeat_ngram_size": 3},
    {"language": "en", "condition_on_prev_tokens": True, "bad_words_ids": [[5, 6, 7]]},
    {"language": "en", "condition_on_prev_tokens": True, "prompt_ids": PROMPT},
    {
        "language": "en", "condition_on_prev_tokens": True, "prompt_ids": PROMPT,
        "prompt_condition_type": "all-segments",
    },
    {"compression_ratio_threshold": 1.2, "temperature": (0.0,)},
    {"logprob_threshold": -1.0, "temperature": (0.0,)},
    {"max_new_tokens": 7, "min_new_tokens": 3},
]  # fmt: skip


def check(arguments: dict[str, Any], seed: int = 0, **options: Any) -> Any:
    """Compare sequences and segments; return those of transformers."""
    model, decoding = whisper_pair(seed, **options)
    arguments = {"return_timestamps": True, "return_segments": True, **arguments}
    expected, got = model.generate(**arguments), decoding.generate(**arguments)
    assert got["sequences"].tolist() == expected["sequences"].tolist()
    for ours, theirs in zip(got["segments"], expected["segments"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            if "start" in one:  # a prompt has none
                assert float(one["start"]) == float(other["start"])
                assert float(one["end"]) == float(other["end"])
    return expected


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
def test_tokens_are_those_of_generate(options: dict[str, Any], num_beams: int) -> None:
    audio = long_audio(5.3, 6.2, 4.1, seed=1)
    found = check({**audio, **options, "num_beams": num_beams}, 1)
    assert max(map(len, found["segments"])) > 3


@pytest.mark.parametrize("options", OPTIONS[2:6:3], ids=lambda o: "+".join(o))
def test_one_audio(options: dict[str, Any]) -> None:
    audio = long_audio(6.4, seed=3)
    for name in ("attention_mask", None):
        check({**audio, **options}, 1)
        audio.pop(name, None) if name else None


def test_an_english_model() -> None:
    check({**long_audio(5.2, 3.1), "num_beams": 2}, english=True)
    check(
        {
            **long_audio(5.2),
            "logprob_threshold": -1.0,
            "no_speech_threshold": 0.1,
            "temperature": (0.0,),
        },
        english=True,
    )
    _, decoding = whisper_pair(0, english=True)
    with pytest.raises(ValueError, match="`task` or `language` for an English-only model"):
        decoding.generate(**short_audio(), language="en")


def test_is_multilingual_and_several_sequences() -> None:
    check({**long_audio(4.2, 5.1), "num_return_sequences": 2, "num_beams": 3}, 1)
    check({**short_audio(), "is_multilingual": True, "language": "fr", "num_beams": 2}, 1)


def sure_of_silence(seed: int = 0) -> Any:
    """Return a model to which about half of all windows have no speech."""
    model = make_whisper(seed)
    memory = model.get_encoder()(**{"input_features": short_audio(4)["input_features"]})[0]
    hidden = model.get_decoder()(input_ids=torch.full((4, 1), START), encoder_hidden_states=memory)[
        0
    ][:, 0]
    logits = model.proj_out(hidden)
    with torch.no_grad():  # as large as all others together for the mean of them
        mean = hidden.mean(0)
        model.get_input_embeddings().weight[NO_SPEECH] = (
            mean * logits.logsumexp(-1).mean() / mean.dot(mean)
        )
    return model


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("previous", [False, True])
def test_the_probability_of_no_speech(
    num_beams: int, previous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-4, and so the windows that are left out, without torch's encoder or decoder."""
    model = sure_of_silence()
    decoding = lmdecode.Decoding.from_pretrained(model)
    found: list[float] = []
    own = WhisperGenerationMixin._need_fallback

    def spy(self: Any, *arguments: Any) -> Any:
        (processor,) = [p for p in arguments[3] if isinstance(p, WhisperNoSpeechDetection)]
        found.append(float(processor.no_speech_prob[arguments[2]]))
        return own(self, *arguments)

    monkeypatch.setattr(WhisperGenerationMixin, "_need_fallback", spy)
    arguments = dict(
        **long_audio(5.3, 7.2, 4.1),
        language="en",
        num_beams=num_beams,
        condition_on_prev_tokens=previous,
        temperature=(0.0,),
        logprob_threshold=0.0,  # so that this alone decides
        no_speech_threshold=0.1,
    )
    expected = model.generate(**arguments)
    theirs, found[:] = list(found), []
    refuse_torch(monkeypatch)
    got = decoding.generate(**arguments)
    assert got.tolist() == expected.tolist()
    assert found == pytest.approx(theirs, abs=1e-4)
    assert len(theirs) > 4 and min(theirs) < 0.1 < max(theirs)


def refuse_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's own encoder and decoder fail."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's own was called")

    for kind in (WhisperEncoder, WhisperDecoder):
        monkeypatch.setattr(kind, "forward", fail)


def test_the_encoder_reads_a_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the language, and for each temperature; and it is that in C++."""
    model, decoding = whisper_pair(0)
    features = {"input_features": short_audio()["input_features"]}
    expected = model.generate(**features, return_timestamps=True)
    languages = model.detect_language(**features)
    rows: list[int] = []
    encoder = decoding.encoder
    own = encoder._of_features

    def count(windows: torch.Tensor) -> Any:
        rows.append(len(windows))
        return own(windows)

    refuse_torch(monkeypatch)
    monkeypatch.setattr(encoder, "_of_features", count)
    arguments = dict(**features, return_timestamps=True, force_unique_generate_call=True)
    got = decoding.generate(**features, return_timestamps=True, return_segments=True)
    assert got["sequences"].tolist() == expected.tolist()
    first = [segments[0]["result"] for segments in got["segments"]]
    assert [int(sequence[1]) for sequence in first] == languages.tolist()
    rows.clear()
    decoding.generate(**arguments)
    assert rows == [3]
    rows.clear()
    # Nothing is as good as that: all temperatures are tried.
    decoding.generate(**arguments, temperature=(0.0, 0.3, 0.6), logprob_threshold=0.0)
    assert rows == [3]
    rows.clear()
    twice = features["input_features"][[0, 1, 0, 0]]
    decoding.generate(**{**arguments, "input_features": twice}, language="en")
    assert rows == [2]


def test_nan_beside_windows_that_are_alike() -> None:
    _, decoding = whisper_pair(0)
    features = short_audio(2)["input_features"][[0, 1, 0]]
    features[1] = torch.nan
    with pytest.raises(RuntimeError, match="prompt 1 has NaN in its logits"):
        decoding.generate(input_features=features, language="en", return_timestamps=True)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_encoder_is_given_what_it_gave(num_beams: int) -> None:
    model, decoding = whisper_pair(0)
    memory = model.get_encoder()(short_audio()["input_features"])
    common = dict(num_beams=num_beams, force_unique_generate_call=True, return_timestamps=True)
    for more in ({"language": "en"}, {"task": "transcribe"}):
        arguments: dict[str, Any] = {**common, **more}
        # transformers writes to the outputs that it is given.
        expected = model.generate(encoder_outputs=copy.copy(memory), **arguments)
        assert decoding.generate(encoder_outputs=memory, **arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_mask_of_the_prompt(num_beams: int) -> None:
    """What it leaves out is not there, wherever it stands."""
    model, decoding = whisper_pair(1)
    prompt = torch.tensor([[PREVIOUS, 300, 301, START, 50259, TASKS["transcribe"]]]).repeat(3, 1)
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    mask[2, 1] = 0
    features = short_audio()["input_features"]
    arguments: dict[str, Any] = dict(
        input_features=features,
        num_beams=num_beams,
        return_timestamps=True,
        decoder_input_ids=prompt,
        decoder_attention_mask=mask,
        force_unique_generate_call=True,
    )
    expected = model.generate(**arguments)
    assert decoding.generate(**arguments).tolist() == expected.tolist()
    alone = decoding.generate(
        input_features=features[1:2],
        num_beams=num_beams,
        return_timestamps=True,
        decoder_input_ids=prompt[1:2, 3:],
        force_unique_generate_call=True,
    )
    new, length = expected[1, 6:], alone.shape[1] - 3
    assert new[:length].tolist() == alone[0, 3:].tolist()
    arguments["decoder_attention_mask"] = mask.clone()
    arguments["decoder_attention_mask"][0, -1] = 0
    with pytest.raises(ValueError, match=r"^decoder_attention_mask: expected 1 for the last"):
        decoding.generate(**arguments)
    arguments["decoder_attention_mask"] = mask[:, 1:]
    with pytest.raises(ValueError, match="decoder_attention_mask"):
        decoding.generate(**arguments)


def test_times_in_text_are_timestamps() -> None:
    found = check({**long_audio(4.4), "language": "en"})
    assert (found["sequences"] >= FIRST_TIMESTAMP).any()


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_an_audio_does_not_depend_on_the_others(dtype: str, num_beams: int) -> None:
    model, _ = whisper_pair()
    decoding = lmdecode.Decoding.from_pretrained(model, dtype)
    inputs = long_audio(5.3, 3.1)
    options: dict[str, Any] = {"return_timestamps": True, "language": "en", "num_beams": num_beams}
    both = decoding.generate(**inputs, **options)
    frames = inputs["attention_mask"].sum(dim=-1).tolist()
    for row, whole in enumerate(both):
        features = inputs["input_features"][row : row + 1, :, : frames[row]]
        (alone,) = decoding.generate(input_features=features, **options)
        assert len(alone) > 9
        assert alone.equal(whole[: len(alone)]) and set(whole[len(alone) :].tolist()) <= {END}


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
def test_timestamps_are_those_of_generate(
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


WORD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"condition_on_prev_tokens": True, "num_beams": 2},
    {"prompt_ids": torch.tensor([50361, 300, 301])},
    {"temperature": (0.0, 1e-4), "logprob_threshold": 0.0},
]


def check_words(arguments: dict[str, Any], seed: int = 0) -> Any:
    model, decoding = whisper_pair(seed)
    arguments = {
        "language": "en", "return_timestamps": True, "return_token_timestamps": True, **arguments,
    }  # fmt: skip
    expected, got = model.generate(**arguments), decoding.generate(**arguments)
    assert got["sequences"].tolist() == expected["sequences"].tolist()
    assert got["token_timestamps"].dtype == torch.float32
    torch.testing.assert_close(
        got["token_timestamps"], expected["token_timestamps"], atol=1e-6, rtol=0
    )
    times = got["token_timestamps"]
    assert len(times.unique()) > 5 and float(times.min()) >= 0
    return got


@pytest.mark.parametrize("options", WORD_OPTIONS, ids=lambda o: "+".join(o) or "greedy")
def test_one_window(options: dict[str, Any]) -> None:
    for seed in range(2):
        found = check_words({**short_audio(seed=seed), **options}, seed)
        assert float(found["token_timestamps"].max()) <= 2 * SECONDS
    one = {name: tensor[:1] for name, tensor in short_audio().items()}
    check_words({**one, **options})
    one.pop("attention_mask")
    check_words({**one, **options})


@pytest.mark.parametrize("options", WORD_OPTIONS, ids=lambda o: "+".join(o) or "greedy")
def test_words_of_long_audio(options: dict[str, Any]) -> None:
    model, decoding = whisper_pair(1)
    arguments: dict[str, Any] = dict(
        **long_audio(5.2, 4.3), **options, language="de", return_token_timestamps=True
    )
    arguments |= {"return_timestamps": True, "return_segments": True}
    expected, got = model.generate(**arguments), decoding.generate(**arguments)
    count = 0
    for ours, theirs in zip(got["segments"], expected["segments"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            if "token_timestamps" in other:
                count += 1
                torch.testing.assert_close(one["token_timestamps"], other["token_timestamps"])
    assert count > 4


def test_without_times_in_the_text() -> None:
    check_words({**short_audio(), "return_timestamps": False, "force_unique_generate_call": True})


def test_the_decoder_of_torch_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_whisper(0)
    decoding = lmdecode.Decoding.from_pretrained(model)
    shapes: list[tuple[int, ...]] = []
    own = WhisperDecoder.forward

    def count(self: Any, **options: Any) -> Any:
        shapes.append(tuple(options["input_ids"].shape))
        return own(self, **options)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's encoder was called")

    monkeypatch.setattr(WhisperEncoder, "forward", fail)
    monkeypatch.setattr(WhisperDecoder, "forward", count)
    got = decoding.generate(
        **short_audio(),
        language="en",
        num_beams=3,
        return_timestamps=True,
        return_token_timestamps=True,
        force_unique_generate_call=True,
    )
    assert shapes == [(3, got["sequences"].shape[1] - 1)]


def test_what_it_needs() -> None:
    model = make_whisper(0)
    decoding = lmdecode.Decoding.from_pretrained(model)
    arguments: dict[str, Any] = dict(**short_audio(), language="en", return_token_timestamps=True)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        decoding.generate(**arguments, output_attentions=True)
    with pytest.raises(ValueError, match="output_hidden_states"):
        decoding.generate(**arguments, output_hidden_states=True)
    del model.generation_config.alignment_heads
    with pytest.raises(ValueError, match="alignment_heads"):
        decoding.generate(**arguments)


def test_a_model_without_weights_says_so(tmp_path: Path) -> None:
    """All else works with it."""
    model, _ = whisper_pair(0)
    lmdecode.Decoding.from_pretrained(model).save(tmp_path)
    decoding = lmdecode.Decoding.load(tmp_path)
    arguments: dict[str, Any] = dict(
        **long_audio(5.2, 3.3), return_timestamps=True, no_speech_threshold=0.9,
        logprob_threshold=-9.0, temperature=(0.0, 0.5), condition_on_prev_tokens=True,
    )  # fmt: skip
    expected = model.generate(**arguments)
    assert decoding.generate(**arguments).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=r"^return_token_timestamps: expected None"):
        decoding.generate(**short_audio(), language="en", return_token_timestamps=True)


CHUNKS = {"chunk_length_s": 2, "stride_length_s": 0.4}
CALLS: list[dict[str, Any]] = [
    {"return_timestamps": True},
    {"return_timestamps": "word"},
    CHUNKS,
    CHUNKS | {"return_timestamps": True, "batch_size": 3},
    CHUNKS | {"return_timestamps": "word", "batch_size": 2},
    {"return_timestamps": True, "return_language": True},
    {
        "return_timestamps": True,
        "generate_kwargs": {"num_beams": 3, "language": "de", "task": "translate"},
    },
    {
        "return_timestamps": True,
        "generate_kwargs": {
            "condition_on_prev_tokens": True, "temperature": (0.0, 1e-4), "logprob_threshold": -1.0,
            "no_speech_threshold": 0.6, "compression_ratio_threshold": 1.35,
        },
    },
]  # fmt: skip


PIPELINE = pytest.mark.skipif(
    BEFORE_5_1, reason="the pipeline of transformers 5.0 fails on recordings without chunk_length_s"
)


@functools.cache
def pipes() -> tuple[Any, Any]:
    """Return the pipelines of a model, and of one whose generate() is Decoding's."""
    plain, model = make_whisper(0), make_whisper(0)
    model.generate = lmdecode.Decoding.from_pretrained(model).generate
    ours, theirs = (
        pipeline(
            "automatic-speech-recognition",
            model=each,
            tokenizer=whisper_tokenizer(),
            feature_extractor=extractor(),
            max_new_tokens=24,  # as the model says, whose config transformers 5.0 passes over
        )
        for each in (model, plain)
    )
    return ours, theirs


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, marks=() if "chunk_length_s" in call else PIPELINE, id="+".join(call))
        for call in CALLS
    ],
)
def test_the_text_is_that_of_the_model(call: dict[str, Any]) -> None:
    ours, theirs = pipes()
    sounds = [audio(5.1, 1), audio(1.4, 2), audio(3.3, 3)]
    got = [ours(sound.copy(), **call) for sound in sounds]
    expected = [theirs(sound.copy(), **call) for sound in sounds]
    assert got == expected
    assert all(len(text["text"].split()) > 3 for text in got)
    if "return_timestamps" in call:
        assert all(text["chunks"] for text in got)


@PIPELINE
def test_several_at_once() -> None:
    ours, theirs = pipes()
    sounds = [audio(1.9, 4), audio(1.2, 5), audio(0.7, 6)]
    call: dict[str, Any] = {"return_timestamps": True, "batch_size": 3}
    got = ours([sound.copy() for sound in sounds], **call)
    assert got == theirs([sound.copy() for sound in sounds], **call)


# So cold that the noise changes no draw.
AGAIN: dict[str, Any] = {"return_timestamps": True, "temperature": (0.0, 1e-5)}


def check_alone(decoding: Any, inputs: dict[str, Any], **options: Any) -> list[list[int]]:
    """Compare each sound of a batch with itself alone; return the texts."""
    together = decoding.generate(**inputs, **AGAIN, **options)
    found = []
    for row, frames in enumerate(inputs["attention_mask"].sum(dim=-1).tolist()):
        features = inputs["input_features"][row : row + 1, :, :frames]
        (alone,) = decoding.generate(input_features=features, **AGAIN, **options).tolist()
        found.append([token for token in alone if token != END])
        assert [token for token in together[row].tolist() if token != END] == found[-1]
    return found


@pytest.mark.parametrize(("num_beams", "least"), [(1, -2.9), (3, -2.65)])
def test_silence_is_that_of_its_sound(num_beams: int, least: float) -> None:
    """transformers 5.23.0 takes the row of the batch that is tried again."""
    decoding = lmdecode.Decoding.from_pretrained(sure_of_silence())
    # The first sound begins with a text that is good, though it may be silence; the second with
    # one that is tried again, as the first row.
    found = check_alone(
        decoding, long_audio(5.2, 5.2, 5.2, seed=4), language="en", num_beams=num_beams,
        logprob_threshold=least, no_speech_threshold=0.065,
    )  # fmt: skip
    assert all(found)


@pytest.mark.parametrize("english", [False, True])
def test_beams_are_given_up_for_the_sound_that_was_sampled(english: bool) -> None:
    """transformers 5.23.0 gives them up for all sounds of the call."""
    _, decoding = whisper_pair(1, english=english)
    options: dict[str, Any] = {} if english else {"language": "en"}
    again = check_alone(
        decoding, long_audio(5.3, 7.2), num_beams=3, logprob_threshold=-3.5, **options
    )
    searched = decoding.generate(
        **long_audio(5.3, 7.2), **{**AGAIN, "temperature": (0.0,)}, num_beams=3, **options
    )
    assert again != [[token for token in row if token != END] for row in searched.tolist()]


def test_silence_needs_both_thresholds() -> None:
    """transformers 5.23.0 ends in an UnboundLocalError."""
    _, decoding = whisper_pair(0)
    with pytest.raises(ValueError, match=r"^no_speech_threshold: expected None without a logprob"):
        decoding.generate(**long_audio(4.1), **AGAIN, language="en", no_speech_threshold=0.6)
