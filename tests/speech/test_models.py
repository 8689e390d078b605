"""What a ``Transcriber`` is made of: saved models without transformers, tokenizers, refusals."""

import copy
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import ALWAYS, one_slot
from lmdecode.reference.decoder import timestamp_rule
from lmdecode.speech.chunks import cut_at_quiet, merge_speech
from lmdecode.speech.languages import LANGUAGES, code_of_language
from lmdecode.speech.options import TranscriptionOptions
from lmdecode.speech.rules import ruled
from lmdecode.speech.tokenizer import load_tokenizer
from lmdecode.speech.windows import split_window
from tests.decoder.decoder_models import make_model
from tests.decoder.whisper_models import (
    END,
    FIRST_TIMESTAMP,
    PREVIOUS,
    SECONDS,
    long_audio,
    whisper_pair,
)
from tests.speech.models import EASY, sound, tokenizer, transcriber, transcriber_pair

WITHOUT_TRANSFORMERS = """
import json, sys
sys.modules["transformers"] = None
sys.modules["numpy"] = None
import torch, lmdecode
samples = torch.load(sys.argv[2])
ours = lmdecode.Transcriber(sys.argv[1])
segments, info = ours.transcribe(samples, word_timestamps=True, **json.loads(sys.argv[3]))
print(json.dumps([[s.tokens, s.text, [w.start for w in s.words]] for s in segments]))
assert info.all_language_probs
"""


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.slow
def test_a_saved_model_needs_no_transformers(dtype: str, tmp_path: Path) -> None:
    import torch

    model, _ = whisper_pair(1)
    decoding = lmdecode.Decoding.from_pretrained(model, dtype)
    decoding.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved has no tokenizer\.json; expected one beside"):
        lmdecode.Transcriber(tmp_path / "saved")
    tokenizer().save(str(tmp_path / "saved" / "tokenizer.json"))
    torch.save(sound(5.2), tmp_path / "sound.pt")
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path / "saved")]
    done = subprocess.run(
        [*command, str(tmp_path / "sound.pt"), json.dumps(EASY)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = lmdecode.Transcriber(decoding, tokenizer=tokenizer())
    segments, _ = ours.transcribe(sound(5.2), word_timestamps=True, **EASY)
    expected = [[s.tokens, s.text, [w.start for w in s.words or ()]] for s in segments]
    assert expected and json.loads(done.stdout) == expected


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    model, decoding = whisper_pair(1)
    model.save_pretrained(tmp_path)
    generation = copy.deepcopy(model.generation_config)
    generation._from_model_config = False  # or transformers leaves out what is Whisper's
    generation.save_pretrained(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    same = lmdecode.Transcriber(decoding, tokenizer=tmp_path)
    expected = list(same.transcribe(sound(SECONDS), **EASY)[0])
    ours = lmdecode.Transcriber(tmp_path, "float32")
    assert list(ours.transcribe(sound(SECONDS), **EASY)[0]) == expected
    assert sorted(ours.supported_languages) == ["de", "en", "fr"] and ours.is_multilingual


def test_a_vocabulary_of_two_files(tmp_path: Path) -> None:
    letters = {"a": 0, "b": 1, "\u0120": 2, "ab": 3, "\u0120ab": 4, "<|endoftext|>": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|de|>": 7, "<|en|>": 6}))
    found = load_tokenizer(tmp_path)
    assert found.encode(" abb").ids == [4, 1] and found.decode([4, 1]) == " abb"
    assert found.token_to_id("<|en|>") == 6 and found.token_to_id("<|de|>") == 7
    assert load_tokenizer(tmp_path / "nothing") is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_models_of_other_kinds(tmp_path: Path) -> None:
    other = lmdecode.Decoding.from_pretrained(make_model("marian"))
    with pytest.raises(ValueError, match="model is of type 'marian'; expected a Whisper model"):
        lmdecode.Transcriber(other)
    other.save(tmp_path)
    with pytest.raises(ValueError, match="has no Whisper model"):
        lmdecode.Transcriber(tmp_path)
    with pytest.raises(TypeError, match="tokenizer is of type int"):
        lmdecode.Transcriber(whisper_pair(0)[1], tokenizer=3)
    with pytest.raises(ValueError, match=r"the model has no tokenizer\.json"):
        lmdecode.Transcriber(whisper_pair(0)[1])


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    import tokenizers

    other: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    model, decoding = whisper_pair(0)
    generation = model.generation_config
    kept, generation.no_timestamps_token_id = generation.no_timestamps_token_id, None
    try:
        with pytest.raises(ValueError, match=r"has no <\|notimestamps\|>"):
            lmdecode.Transcriber(decoding, tokenizer=other)
    finally:
        generation.no_timestamps_token_id = kept


def test_languages() -> None:
    from transformers.models.whisper import tokenization_whisper

    assert list(LANGUAGES.items()) == list(tokenization_whisper.LANGUAGES.items())
    for name, code in tokenization_whisper.TO_LANGUAGE_CODE.items():
        assert code_of_language(f" {name.title()} ") == code
    assert code_of_language("EN") == "en"
    assert transcriber().supported_languages == ["en", "de", "fr"]


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("task", "sing", ValueError, "'sing'; expected one of transcribe, translate"),
    ("task", 1, TypeError, "of type int"),
    ("language", "klingon", ValueError, "'klingon'; expected one of en, de, fr"),
    ("language", 3, TypeError, "of type int"),
    ("beam_size", 0, ValueError, "0; expected 1 to 128"),
    ("beam_size", 2.0, TypeError, "of type float"),
    ("beam_size", True, TypeError, "of type bool"),
    ("best_of", 0, ValueError, "0; expected 1 to 128"),
    ("patience", 0.0, ValueError, "0.0; expected a number above 0"),
    ("patience", "much", TypeError, "of type str"),
    ("length_penalty", float("nan"), ValueError, "nan"),
    ("repetition_penalty", -1.0, ValueError, "above 0"),
    ("no_repeat_ngram_size", -1, ValueError, "-1"),
    ("temperature", (), ValueError, r"\(\)"),
    ("temperature", -0.1, ValueError, "-0.1; expected one number or more, each at least 0"),
    ("temperature", (0.2, 0.0), ValueError, "above 0 behind the first"),
    ("temperature", "warm", TypeError, "of type str"),
    ("temperature", float("inf"), ValueError, "inf"),
    ("compression_ratio_threshold", "2", TypeError, "expected a number or None"),
    ("log_prob_threshold", [], TypeError, "expected a number or None"),
    ("no_speech_threshold", True, TypeError, "expected a number or None"),
    ("condition_on_previous_text", 1, TypeError, "expected a bool or None"),
    ("batched", "yes", TypeError, "expected a bool or None"),
    ("word_timestamps", None, TypeError, "expected a bool"),
    ("initial_prompt", [1, -2], ValueError, "-2; expected at least 0"),
    ("initial_prompt", [1, 60000], ValueError, "expected tokens below"),
    ("suppress_tokens", [-1, 60000], ValueError, "expected tokens below"),
    ("initial_prompt", 3.5, TypeError, "expected token ids"),
    ("hotwords", ["a"], TypeError, "expected a str or None"),
    ("prefix", 1, TypeError, "expected a str or None"),
    ("suppress_tokens", [-2], ValueError, "-2; expected at least -1"),
    ("suppress_tokens", "12", TypeError, "expected token ids"),
    ("max_initial_timestamp", -1.0, ValueError, "-1.0; expected at least 0, or None"),
    ("max_new_tokens", 0, ValueError, "0; expected"),
    ("append_punctuations", None, TypeError, "expected a str"),
    ("seed", -1, ValueError, "-1; expected"),
    ("vad", 1, TypeError, "expected a bool"),
    ("batch_size", 0, ValueError, "0; expected 1 to 1024"),
    ("progress", "bar", TypeError, "expected a callable or None"),
]


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"), WRONG, ids=lambda value: str(value)[:20]
)
def test_wrong_arguments(name: str, value: Any, kind: type[Exception], message: str) -> None:
    arguments = {name: value}
    with pytest.raises(kind, match=f"^Transcriber.transcribe: {name} is .*{message}"):
        transcriber().transcribe(sound(0.5), **arguments)


def test_windows_together_do_not_know_each_other() -> None:
    with pytest.raises(ValueError, match="condition_on_previous_text is True beside batched"):
        transcriber().transcribe(sound(0.5), batched=True, condition_on_previous_text=True)
    for options, expected in (
        ({}, True),
        ({"batched": True}, False),
        ({"condition_on_previous_text": False}, False),
        ({"batched": False, "condition_on_previous_text": False}, False),
    ):
        _, info = transcriber().transcribe(sound(0.5), language="en", **options)
        assert info.transcription_options.condition_on_previous_text is expected


def test_defaults_are_those_of_the_call() -> None:
    _, info = transcriber().transcribe(sound(0.5), language="en")
    assert info.transcription_options == TranscriptionOptions()
    assert info.transcription_options.temperature == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def test_words_need_heads_that_are_known() -> None:
    ours = transcriber()
    heads, ours._model.alignment_heads = ours._model.alignment_heads, []
    try:
        with pytest.raises(ValueError, match="word_timestamps is True; expected False"):
            ours.transcribe(sound(0.5), word_timestamps=True)
    finally:
        ours._model.alignment_heads = heads


def test_prompts_longer_than_the_model_looks_back() -> None:
    ours = transcriber()
    options: dict[str, Any] = {"language": "en", "temperature": 0.0}
    many = list(range(300, 400))
    segments, _ = ours.transcribe(sound(1.0), initial_prompt=many, **options)
    same, _ = ours.transcribe(sound(1.0), initial_prompt=many[-31:], **options)
    assert list(segments) == list(same)
    for more in ({"hotwords": "w1 " * 99}, {"prefix": "w1 " * 99}):
        list(ours.transcribe(sound(1.0), initial_prompt=many, **options, **more)[0])


FIRST, VOCAB, LAST = 20, 40, 12  # times; tokens; the end token


def penalised(logits: Tensor, new: list[int], penalty: float, size: int) -> Tensor:
    """Return logits as CTranslate2 4.8.5 changes them, before it forbids tokens and times."""
    logits = logits.clone()
    for token in set(new):
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    if size and len(new) >= size - 1:
        last = new[len(new) - (size - 1) :]
        for i in range(len(new) - size + 1):
            if new[i : i + size - 1] == last:
                logits[new[i + size - 1]] = -torch.inf
    return logits


def text(r: random.Random) -> list[int]:
    """Return what may have been generated: pieces of text between times that do not fall."""
    tokens, at = [FIRST], FIRST
    for _ in range(r.randrange(4)):
        tokens += [r.randrange(6) for _ in range(r.randrange(1, 4))]
        at = min(VOCAB - 1, at + r.randrange(1, 4))
        tokens += [at] * r.randrange(1, 3)
    return tokens[: r.randrange(len(tokens) + 1)]


@pytest.mark.parametrize("timed", [False, True])
def test_penalties_come_before_the_rule_of_times(timed: bool) -> None:
    r, generator = random.Random(0), torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(400):
        tokens, prefix = text(r), r.choice([0, 0, 1])
        prefix = min(prefix, len(tokens))
        size, penalty = r.choice([0, 1, 2, 3]), r.choice([0.7, 1.0, 1.3, 2.0])
        raw = torch.randn(VOCAB, generator=generator) * 3
        banned = [r.randrange(LAST) for _ in range(3)]
        prompt = [r.randrange(6) for _ in range(5)]  # the same words: they do not count
        sequence = torch.tensor([[*prompt, *tokens]], dtype=torch.int64)
        times = (FIRST, LAST, 5, -1)

        def forbid(logits: Tensor) -> Tensor:
            logits = logits.clone()
            logits[banned] = -torch.inf  # noqa: B023  called in its own turn
            return timestamp_rule(logits[None], sequence, *times)[0] if timed else logits  # noqa: B023

        state, parameters = new_beam_state(1, 1, 40), beam_parameters(1, 1)
        state.sequences[0, 0, : sequence.shape[1]] = sequence[0]
        state.lengths.fill_(sequence.shape[1])
        parameters.prompt_lengths.fill_(5 + prefix)
        rules = one_slot(
            bans=[(token, 0, ALWAYS, 0) for token in banned], timestamps=times if timed else None
        )
        searches: Any = SimpleNamespace(
            state=state, parameters=parameters, token_rules=rules,
            are_running=lambda: torch.ones(1, dtype=torch.bool),
        )  # fmt: skip
        expected = forbid(penalised(raw, tokens[prefix:], penalty, size))
        scores = forbid(raw.log_softmax(0))
        values = torch.stack([raw, scores])[:, None].clone()
        got = ruled(searches, values, penalty, size)[0]
        assert torch.allclose(got.log_softmax(0), expected.log_softmax(0), atol=1e-5)
        changed += not torch.allclose(got.softmax(0), scores.softmax(0), atol=1e-3)
    assert changed > 50


def greedy(model: Any, memory: Tensor, prompt: list[int], bans: list[int], first: list[int],
           penalty: float, size: int, most: int) -> tuple[list[int], list[float]]:  # fmt: skip
    """Return the text of a window by plain torch, and its log-probabilities among what is left."""
    new, found = list[int](), list[float]()
    while len(new) < most and END not in new:
        ids = torch.tensor([[*prompt, *new]])
        logits = model(decoder_input_ids=ids, encoder_outputs=(memory,)).logits[0, -1].double()
        logits = penalised(logits, new, penalty, size)
        logits[[*bans, *(first if not new else [])]] = -torch.inf
        limit = FIRST_TIMESTAMP + 20
        logits = timestamp_rule(
            logits[None], ids, FIRST_TIMESTAMP, END, len(prompt), limit
        )[0].log_softmax(0)  # fmt: skip
        new.append(int(logits.argmax()))
        found.append(float(logits[new[-1]]))
    return new, found


@torch.no_grad()
@pytest.mark.parametrize(("penalty", "size"), [(1.0, 0), (1.5, 0), (1.0, 1), (1.3, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_generated_is_penalised_and_no_prompt(penalty: float, size: int, seed: int) -> None:
    """As faster-whisper 1.2.1; and its avg_logprob, which is normalised among what is allowed."""
    model, ours = transcriber_pair(seed)
    features = long_audio(2.0, seed=seed)["input_features"]
    memory = model.get_encoder()(features)[0]
    tokens = ours._model.tokens
    earlier = [300, 301, *range(400, 425)]
    prompt = [PREVIOUS, *earlier, tokens.start, tokens.languages["en"], tokens.tasks["transcribe"]]
    expected, log_probs = greedy(
        model, memory, prompt, list(tokens.suppressed), list(tokens.suppressed_first),
        penalty, size, 24,
    )  # fmt: skip
    segments, _ = ours.transcribe(
        sound(2.0, seed), language="en", beam_size=1, initial_prompt=earlier, batched=True,
        repetition_penalty=penalty, no_repeat_ngram_size=size, **EASY,
    )  # fmt: skip
    found = list(segments)
    assert [token for s in found for token in s.tokens] == [t for t in expected if t != END]
    count = len([token for token in expected if token != END])
    assert found[0].avg_logprob == pytest.approx(sum(log_probs) / (count + 1), abs=1e-4)


T = 100  # the first time


@pytest.mark.parametrize(
    ("tokens", "is_cut", "pieces", "step"),
    [
        # One piece that has ended: nothing is said behind it.
        ([T, 1, 2, T + 50], True, [(0, 4, 0, 100)], 300),
        # Two, the second of which has ended.
        ([T, 1, T + 5, T + 6, 2, T + 9], True, [(0, 3, 0, 10), (3, 6, 12, 18)], 300),
        # The last pair says where the next window begins.
        ([T, 1, T + 5, T + 6, 2], True, [(0, 3, 0, 10)], 10),
        ([T, 1, T + 5, T + 6, 2], False, [(0, 3, 0, 10), (3, 5, 12, 300)], 300),
        ([T, 1, T + 5, T + 5], True, [(0, 3, 0, 10)], 10),
        ([T, 1, T + 5, T + 5], False, [(0, 3, 0, 10)], 300),
        # No pair: all of the window.
        ([T, 1, 2], True, [(0, 3, 0, 300)], 300),
        ([1, 2, T + 7], True, [(0, 3, 0, 14)], 300),
        ([], True, [(0, 0, 0, 300)], 300),
    ],
)
def test_pieces(tokens: list[int], is_cut: bool, pieces: list[tuple[int, ...]], step: int) -> None:
    assert split_window(tokens, T, 2, 300, is_cut=is_cut) == (pieces, step)


def test_speech_is_merged() -> None:
    speech = [(0, 100), (150, 280), (290, 310), (700, 900), (950, 1001)]
    assert merge_speech(speech, 300) == [(0, 280), (290, 310), (700, 900), (950, 1001)]
    assert merge_speech(speech, 320) == [(0, 310), (700, 1001)]
    assert merge_speech([], 300) == []


def test_a_long_pause_is_in_no_part() -> None:
    """Behind it a model would say that the next words begin where the last ones ended."""
    speech = [(0, 400), (700, 900), (1201, 1500)]
    assert merge_speech(speech, 3000) == [(0, 900), (1201, 1500)]


def test_cuts_are_where_it_is_quiet() -> None:
    features = torch.zeros(4, 1000)
    for place in (250, 520, 790):
        features[:, place - 15 : place + 15] = -1
    parts = cut_at_quiet(features, 1000, 300)
    assert [begin for begin, _ in parts] == pytest.approx([0, 250, 520, 790], abs=6)
    assert parts[-1][1] == 1000
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert cut_at_quiet(features, 300, 300) == [(0, 300)]
    even = cut_at_quiet(torch.zeros(4, 1000), 1000, 300)
    assert all(0 < end - begin <= 300 for begin, end in even)
