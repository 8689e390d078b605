"""Features against transformers' extractor."""

import pytest
import torch
from transformers import WhisperFeatureExtractor

from lmdecode.speech.features import HOP, RATE, LogMel


@pytest.mark.parametrize("channels", [16, 80, 128])
@pytest.mark.parametrize("samples", [0, 1, 150, 3 * RATE + 77, 30 * RATE])
def test_a_window(channels: int, samples: int) -> None:
    sound = torch.randn(samples, generator=torch.Generator().manual_seed(0)) * 0.1
    extractor = WhisperFeatureExtractor(feature_size=channels)
    if samples:
        found = extractor(sound.numpy(), sampling_rate=RATE, return_tensors="pt")
    else:
        found = extractor(torch.zeros(1).numpy(), sampling_rate=RATE, return_tensors="pt")
    got = LogMel(channels)(sound, 3000)
    torch.testing.assert_close(got, found.input_features[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("seconds", [30.01, 61.7])
def test_a_long_sound(seconds: float) -> None:
    """Its parts are computed one by one, and its loudest place sets the floor of all."""
    sound = torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(0)) * 0.01
    sound[len(sound) // 2 :][:5000] *= 80
    sound[:RATE] = 0
    found = WhisperFeatureExtractor()(
        sound.numpy(), sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
    )
    got = LogMel(80)(sound)
    assert got.shape == (80, len(sound) // HOP)
    torch.testing.assert_close(got, found.input_features[0], rtol=0, atol=1e-5)


def test_a_sound_without_a_frame() -> None:
    assert LogMel(80)(torch.zeros(0)).shape == (80, 0)
    assert LogMel(80)(torch.zeros(HOP - 1)).shape == (80, 0)
