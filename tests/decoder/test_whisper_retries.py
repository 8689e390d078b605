"""Windows of Whisper that are tried again: a sound has the text that it has alone."""

from typing import Any

import pytest

import lmdecode
from tests.decoder.test_whisper_long import sure_of_silence
from tests.decoder.whisper_models import END, long_audio, whisper_pair

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
