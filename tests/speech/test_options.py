"""Wrong arguments: the error names the argument, what came and what was expected."""

from typing import Any

import pytest

from lmdecode.speech.options import TranscriptionOptions
from tests.speech.models import sound, transcriber

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
