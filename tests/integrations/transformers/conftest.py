"""Tiny models with random weights, one of each kind of cache and attention."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

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
def _build(name: str, vocab_size: int, dtype: torch.dtype) -> PreTrainedModel:
    model_class, config_class, arguments = model_arguments(name, vocab_size)
    config = getattr(transformers, config_class)(**arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return getattr(transformers, model_class)(config).eval().to(dtype)


@pytest.fixture
def make_model():
    """Return ``make_model(name, vocab_size=61, dtype=float32)``; tests share the models."""

    def make(
        name: str, vocab_size: int = VOCAB, dtype: torch.dtype = torch.float32
    ) -> PreTrainedModel:
        return _build(name, vocab_size, dtype)

    return make


@pytest.fixture(params=DECODER_ONLY + ENCODER_DECODER)
def model(request, make_model) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(params=DECODER_ONLY)
def decoder_model(request, make_model) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(params=BEAM_MODELS)
def beam_model(request, make_model) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture
def llama(make_model) -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def prompts() -> torch.Tensor:
    """Return [3, 6] int64 ids without special tokens."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB, (3, 6), generator=generator)


@pytest.fixture
def padded_prompts(prompts) -> dict[str, torch.Tensor]:
    """Return the prompts cut to 6, 4 and 1 tokens and padded on the left, with their mask."""
    ids, mask = prompts.clone(), torch.ones_like(prompts)
    for row, padding in enumerate((0, 2, 5)):
        ids[row, :padding] = PAD
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


class WarperSpy:
    """Counts how often transformers' own last steps run."""

    def __init__(self) -> None:
        self.op_calls: list[tuple[torch.Tensor, dict]] = []
        self.multinomial_calls = 0
        self.warper_calls = 0


@pytest.fixture
def spy(monkeypatch) -> WarperSpy:
    """Watch the fused op, ``torch.multinomial`` and the four warpers."""
    from transformers.generation import logits_process

    import lmdecode.sampling

    seen = WarperSpy()
    op, multinomial = lmdecode.sampling.top_k_top_p_sample, torch.multinomial

    def counted_op(logits, *args, **kwargs):
        assert not args
        seen.op_calls.append((logits, kwargs))
        return op(logits, **kwargs)

    def counted_multinomial(*args, **kwargs):
        seen.multinomial_calls += 1
        return multinomial(*args, **kwargs)

    monkeypatch.setattr(lmdecode.sampling, "top_k_top_p_sample", counted_op)
    monkeypatch.setattr(torch, "multinomial", counted_multinomial)
    for name in ("Temperature", "TopK", "TopP", "MinP"):
        warper = getattr(logits_process, f"{name}LogitsWarper")
        monkeypatch.setattr(warper, "__call__", _counted_call(seen, warper.__call__))
    return seen


def _counted_call(seen: WarperSpy, original):
    # transformers counts the parameters of a processor's __call__, so it has no others.
    def call(self, input_ids, scores):
        seen.warper_calls += 1
        return original(self, input_ids, scores)

    return call
