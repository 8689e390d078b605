"""Small random encoder-decoder models of each kind, and inputs for them."""

import functools
from typing import Any

import torch

import lmdecode
from tests.support.tiny_models import noisy_norms, seeded_model

VOCAB, END, PAD = 64, 2, 1
_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 96, "eos_token_id": END,
    "pad_token_id": PAD, "bos_token_id": 0, "decoder_start_token_id": END, "init_std": 0.4,
}  # fmt: skip
_SCALED = {**_BART, "activation_function": "relu", "scale_embedding": True}
# 10 is no multiple of a vector, and 3 heads of 10 are not d_model.
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu", "eos_token_id": END, "pad_token_id": PAD,
    "decoder_start_token_id": PAD, "initializer_factor": 3.0,
}  # fmt: skip
_WHISPER = {
    **{name: value for name, value in _BART.items() if name != "max_position_embeddings"},
    "max_source_positions": 20, "max_target_positions": 60, "num_mel_bins": 8,
    "suppress_tokens": [5, 6], "begin_suppress_tokens": [7, END],
}  # fmt: skip
# Class of the model, and arguments of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("MarianMTModel", {**_SCALED, "activation_function": "swish"}),
    "bart": ("BartForConditionalGeneration", {
        **_BART, "activation_function": "gelu", "forced_eos_token_id": END,
    }),
    "mbart": ("MBartForConditionalGeneration", _SCALED),
    "t5": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "relu"}),
    "t5_gated": ("T5ForConditionalGeneration", {**_T5, "tie_word_embeddings": False}),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
    "pegasus": ("PegasusForConditionalGeneration", _SCALED),
    "m2m_100": ("M2M100ForConditionalGeneration", _SCALED),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
}  # fmt: skip


def make_model(kind: str, seed: int = 0, **more: Any) -> Any:
    """Return a model that is sure of something: random logits alone would never end."""
    model_class, arguments = MODELS[kind]
    model = noisy_norms(seeded_model(model_class, seed, **{**arguments, **more}))
    if kind.startswith("t5"):  # transformers 5.0 passes over this sign of T5 1.1
        model.config.scale_decoder_outputs = kind == "t5"
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.data.normal_()
    generation = model.generation_config
    generation.max_length = None
    if kind == "whisper":
        generation.suppress_tokens, generation.begin_suppress_tokens = [5, 6], [7, END]
    return model


def make_whisper_with_timestamps() -> Any:
    """Return a multilingual Whisper, 1500 tokens of whose are timestamps."""
    model = make_model("whisper", vocab_size=VOCAB + 1500)
    generation = model.generation_config
    generation.is_multilingual = True
    generation.lang_to_id = {"<|en|>": 50, "<|de|>": 51}
    generation.task_to_id = {"transcribe": 52, "translate": 53}
    generation.no_timestamps_token_id = VOCAB - 1  # timestamps follow
    generation.max_initial_timestamp_index = 5
    generation.prev_sot_token_id = 54
    return model


def make_inputs(kind: str, batch: int = 3, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return ragged sources."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    lengths = torch.randint(3, 12, (batch,), generator=generator)
    lengths[0] = 12
    ids = torch.randint(3, VOCAB, (batch, 12), generator=generator)
    mask = (torch.arange(12) < lengths[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@functools.cache
def pair(kind: str, seed: int = 0) -> tuple[Any, lmdecode.Decoding]:
    """Return a model, and what decodes it; tests share them."""
    model = make_model(kind, seed)
    return model, lmdecode.Decoding.from_pretrained(model)
