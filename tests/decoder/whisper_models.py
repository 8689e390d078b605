"""Small random Whisper models with the vocabulary's layout of the real ones, and audio for them."""

import functools
from typing import Any

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

import lmdecode
from tests.support.tiny_models import noisy_norms, seeded_model

RATE = 16_000
END, START, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = 50257, 50258, 50361, 50362, 50363
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
SECONDS = 2  # of a window, for 30
TIMES = SECONDS * 50 + 1
LANGUAGES = {"<|en|>": 50259, "<|de|>": 50261, "<|fr|>": 50265}
TASKS = {"translate": 50358, "transcribe": 50359}
SIZES: dict[str, Any] = {
    "vocab_size": FIRST_TIMESTAMP + TIMES, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_source_positions": 50 * SECONDS, "max_target_positions": 64,
    "num_mel_bins": 16, "init_std": 0.4, "pad_token_id": END, "bos_token_id": END,
    "eos_token_id": END, "decoder_start_token_id": START, "suppress_tokens": None,
    "begin_suppress_tokens": None, "median_filter_width": 3,
}  # fmt: skip


def make_whisper(
    seed: int = 0, *, english: bool = False, end: float = 1.6, time: float = 1.7
) -> Any:
    """Return a model that ends its texts and is sure of times, by ``end`` and ``time``."""
    model = noisy_norms(seeded_model("WhisperForConditionalGeneration", seed, **SIZES))
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[END] *= end
        embedding[FIRST_TIMESTAMP:] *= time
    generation = model.generation_config
    generation.max_length = None
    generation.max_new_tokens = 24
    generation.no_timestamps_token_id = NO_TIMESTAMPS
    generation.max_initial_timestamp_index = 20
    generation.prev_sot_token_id = PREVIOUS
    generation.alignment_heads = [[0, 1], [1, 0], [1, 3]]
    generation.suppress_tokens = [1, 2, 7, 8, 9, 10, 14, 25, 50358, 50359, 50360, 50361, 50362]
    generation.begin_suppress_tokens = [220, END]
    generation.is_multilingual = not english
    if not english:
        generation.lang_to_id, generation.task_to_id = LANGUAGES, TASKS
    return model


@functools.cache
def whisper_pair(seed: int = 0, **options: Any) -> tuple[Any, lmdecode.Decoding]:
    """Return a model, and what decodes it; tests share them."""
    model = make_whisper(seed, **options)
    return model, lmdecode.Decoding.from_pretrained(model)


def extractor() -> WhisperFeatureExtractor:
    """Return the feature extractor of these models."""
    return WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)


def audio(seconds: float, seed: int = 0) -> np.ndarray:
    """Return tones that change, in noise, [samples] float32."""
    generator = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    pitch = generator.uniform(100, 3000, size=int(seconds * 8) + 1)
    tones = np.sin(2 * np.pi * pitch[(time * 8).astype(int)] * time)
    loudness = 0.5 + 0.5 * np.sin(2 * np.pi * 0.7 * time + seed)
    return (tones * loudness + 0.05 * generator.standard_normal(len(time))).astype(np.float32)


def short_audio(batch: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return features of audio that fits a window."""
    sounds = [audio(SECONDS * (1 - 0.2 * i), seed + i) for i in range(batch)]
    return dict(
        extractor()(sounds, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    )


def long_audio(*seconds: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return features of audio of several windows, padded to the longest."""
    sounds = [audio(length, seed + i) for i, length in enumerate(seconds)]
    return dict(
        extractor()(
            sounds, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest",
            return_attention_mask=True,
        )
    )  # fmt: skip
