"""Tiny models of transformers with random weights: one of each kind of cache and attention."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB, WINDOW = 61, 5
PAD, BOS, EOS = 0, 1, 2

DECODER_ONLY = ("gpt2", "llama", "mistral", "qwen2")
ENCODER_DECODER = ("bart", "t5")
BEAM_MODELS = ("gpt2", "llama", "mistral", "bart", "t5", "marian")

TOKENS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
# Weights this large give logits that are neither flat nor peaked.
LLAMA_LIKE: dict[str, Any] = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
_BART_LIKE = {
    **TOKENS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 128, "forced_eos_token_id": None,
    "init_std": 0.2,
}  # fmt: skip
_GPT2 = {
    **TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "initializer_range": 0.2,
}  # fmt: skip
_T5 = {
    **TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": PAD, "initializer_factor": 2.0,
}  # fmt: skip
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Class of the model, and arguments of its config: the same in transformers 4 and 5.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "llama": ("LlamaForCausalLM", LLAMA_LIKE),
    "mistral": ("MistralForCausalLM", {**LLAMA_LIKE, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA_LIKE),
    "gemma2": ("Gemma2ForCausalLM", {**LLAMA_LIKE, "query_pre_attn_scalar": 8, **HYBRID}),
    "gemma3": ("Gemma3ForCausalLM", {**LLAMA_LIKE, "query_pre_attn_scalar": 8, **HYBRID}),
    "gpt_oss": ("GptOssForCausalLM", {
        **LLAMA_LIKE, "num_local_experts": 2, "num_experts_per_tok": 1, **HYBRID,
    }),
    "bart": ("BartForConditionalGeneration", {**_BART_LIKE, "decoder_start_token_id": EOS}),
    "marian": ("MarianMTModel", {**_BART_LIKE, "decoder_start_token_id": PAD}),
    "t5": ("T5ForConditionalGeneration", _T5),
}  # fmt: skip


def seeded_model(model_class: str, seed: int = 0, **arguments: Any) -> Any:
    """Return a model of a class of transformers, of a config of its own, in evaluation mode."""
    cls = getattr(transformers, model_class)
    torch.manual_seed(seed)
    return cls(cls.config_class(**arguments)).eval()


@torch.no_grad()
def noisy_norms(model: Any) -> Any:
    """Return the model with norms and biases that are neither 1 nor 0."""
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def model_arguments(name: str, vocab_size: int = VOCAB) -> tuple[str, str, dict[str, Any]]:
    """Return the names of a model's class and of its config's, and the config's arguments."""
    kind, arguments = _KINDS[name]
    config_class = getattr(transformers, kind).config_class.__name__
    return kind, config_class, {**arguments, "vocab_size": vocab_size}


@functools.cache
def build_model(name: str, vocab_size: int, dtype: torch.dtype) -> PreTrainedModel:
    kind, arguments = _KINDS[name]
    with torch.random.fork_rng(devices=[]):
        return seeded_model(kind, 3, **{**arguments, "vocab_size": vocab_size}).to(dtype)


def llama_like(
    name: str, *, seed: int = 3, random_sinks: bool = False, **options: Any
) -> PreTrainedModel:
    """Return a model of the causal architecture, such as "Gemma2", with ``options`` of its own."""
    with torch.random.fork_rng(devices=[]):
        model = seeded_model(f"{name}ForCausalLM", seed, **{**LLAMA_LIKE, **options})
        if random_sinks:
            for layer in model.model.layers:
                layer.self_attn.sinks.data.normal_()
    return model


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
