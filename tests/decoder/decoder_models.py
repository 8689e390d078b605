"""Small random encoder-decoder models of each kind, and inputs for them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import lmdecode

VOCAB, END, PAD = 64, 2, 1


def _bart_sizes(layers: int = 2) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=96,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=0,
        decoder_start_token_id=END,
        init_std=0.4,
    )


def _t5_sizes(gated: bool) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=10,  # no multiple of a vector, and 3 heads of 10 are not d_model
        d_ff=40,
        num_layers=2,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        feed_forward_proj="gated-gelu" if gated else "relu",
        eos_token_id=END,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
        initializer_factor=3.0,
    )


def _t5(gated: bool, **more: Any) -> Any:
    config = T5Config(**_t5_sizes(gated), **more)
    # transformers 5.0 passes over this sign of T5 1.1.
    config.scale_decoder_outputs = more.get("tie_word_embeddings", True)
    return T5ForConditionalGeneration(config)


def _whisper(**more: Any) -> Any:
    sizes = _bart_sizes() | more
    sizes.pop("max_position_embeddings")
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            **sizes,
            max_source_positions=20,
            max_target_positions=60,
            num_mel_bins=8,
            suppress_tokens=[5, 6],
            begin_suppress_tokens=[7, END],
        )
    )
    model.generation_config.suppress_tokens = [5, 6]
    model.generation_config.begin_suppress_tokens = [7, END]
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


MODELS: dict[str, Callable[..., Any]] = {
    "marian": lambda: MarianMTModel(
        MarianConfig(**_bart_sizes(), activation_function="swish", scale_embedding=True)
    ),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(**_bart_sizes(), activation_function="gelu", forced_eos_token_id=END)
    ),
    "mbart": lambda: MBartForConditionalGeneration(
        MBartConfig(**_bart_sizes(), activation_function="relu", scale_embedding=True)
    ),
    "t5": lambda: _t5(gated=False),
    "t5_gated": lambda: _t5(gated=True, tie_word_embeddings=False),
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**_t5_sizes(gated=True))),
    "umt5": lambda: UMT5ForConditionalGeneration(UMT5Config(**_t5_sizes(gated=True))),
    "pegasus": lambda: PegasusForConditionalGeneration(
        PegasusConfig(**_bart_sizes(), activation_function="relu", scale_embedding=True)
    ),
    "m2m_100": lambda **more: M2M100ForConditionalGeneration(
        M2M100Config(**_bart_sizes() | more, activation_function="relu", scale_embedding=True)
    ),
    "whisper": _whisper,
}


def make_model(kind: str, seed: int = 0, **more: Any) -> Any:
    """Return a model that is sure of something: random logits alone would never end."""
    torch.manual_seed(seed)
    model = MODELS[kind](**more).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    model.generation_config.max_length = None
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
