"""The tiny models of these tests: random weights, one of each kind of cache and attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 61
PAD, BOS, EOS = 0, 1, 2

DECODER_ONLY = ("gpt2", "llama", "mistral", "qwen2")
ENCODER_DECODER = ("bart", "t5")
BEAM_MODELS = ("gpt2", "llama", "mistral", "bart", "t5", "marian")


def model_arguments(name: str, vocab_size: int = VOCAB) -> tuple[str, str, dict[str, Any]]:
    """Return the names of a model's class and of its configuration's, and arguments of the latter.

    They are the same in transformers 4 and 5.
    """
    tokens = {
        "vocab_size": vocab_size,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    # Weights this large give logits that are neither flat nor peaked.
    llama_like = {
        **tokens,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    bart_like = {
        **tokens,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 128,
        "forced_eos_token_id": None,
        "init_std": 0.2,
    }
    if name == "gpt2":
        small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        return "GPT2LMHeadModel", "GPT2Config", {**tokens, **small, "initializer_range": 0.2}
    if name == "llama":
        return "LlamaForCausalLM", "LlamaConfig", llama_like
    if name == "mistral":
        return "MistralForCausalLM", "MistralConfig", {**llama_like, "sliding_window": 5}
    if name == "qwen2":
        return "Qwen2ForCausalLM", "Qwen2Config", llama_like
    if name == "bart":
        arguments = {**bart_like, "decoder_start_token_id": EOS}
        return "BartForConditionalGeneration", "BartConfig", arguments
    if name == "marian":
        return "MarianMTModel", "MarianConfig", {**bart_like, "decoder_start_token_id": PAD}
    assert name == "t5"
    arguments = {
        **tokens,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": PAD,
        "initializer_factor": 2.0,
    }
    return "T5ForConditionalGeneration", "T5Config", arguments


@functools.cache
def build_model(name: str, vocab_size: int, dtype: torch.dtype) -> PreTrainedModel:
    model_class, config_class, arguments = model_arguments(name, vocab_size)
    config = getattr(transformers, config_class)(**arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return getattr(transformers, model_class)(config).eval().to(dtype)
