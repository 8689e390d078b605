"""Times of tokens and words: what Whisper's decoder attends to, by one pass over found tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.whisper.modeling_whisper import WhisperDecoder, WhisperEncoder

import lmdecode
from tests.decoder.whisper_models import (
    SECONDS,
    long_audio,
    make_whisper,
    short_audio,
    whisper_pair,
)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"condition_on_prev_tokens": True, "num_beams": 2},
    {"prompt_ids": torch.tensor([50361, 300, 301])},
    {"temperature": (0.0, 1e-4), "logprob_threshold": 0.0},
]


def check(arguments: dict[str, Any], seed: int = 0) -> Any:
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


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "greedy")
def test_one_window(options: dict[str, Any]) -> None:
    for seed in range(2):
        found = check({**short_audio(seed=seed), **options}, seed)
        assert float(found["token_timestamps"].max()) <= 2 * SECONDS
    one = {name: tensor[:1] for name, tensor in short_audio().items()}
    check({**one, **options})
    one.pop("attention_mask")
    check({**one, **options})


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "greedy")
def test_long_audio(options: dict[str, Any]) -> None:
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
    check({**short_audio(), "return_timestamps": False, "force_unique_generate_call": True})


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
