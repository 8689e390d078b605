"""Tiny models of transformers with sizes that are no multiple of anything."""

import functools
from typing import Any

import torch

from tests.support.causal_models import WINDOW, model_of, random_config, random_tokens
from tests.support.tiny_models import noisy_norms, seeded_model

VOCAB, LENGTH = 101, 12
_TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ODD = {
    "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 6,
}  # fmt: skip
_NO_HEAD = {k: v for k, v in _ODD.items() if k != "head_dim"}
# Of configs without key-value heads of their own.
_OLD = {k: v for k, v in _ODD.items() if k not in ("head_dim", "num_key_value_heads")}
_ENCODER = {**_TOKENS, **_OLD, "max_position_embeddings": 64, "initializer_range": 0.2}
_BART = {
    **_TOKENS, "d_model": 36, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 50, "max_position_embeddings": 64, "init_std": 0.2,
    "decoder_start_token_id": 2,
}  # fmt: skip
# torch._grouped_mm refuses strides that are no multiple of 16 bytes.
_GROUPED = {
    "hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 5, "num_key_value_heads": 1,
    "head_dim": 8, "num_hidden_layers": 2,
}  # fmt: skip
_EXPERTS = {**_GROUPED, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# Of causal_models: a variant, and more entries.
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("biases, tied, wide heads", {**_ODD, "head_dim": 20}),
    "qwen2": ("plain, group of 7", {**_NO_HEAD, "hidden_size": 42, "num_attention_heads": 7,
                                    "num_key_value_heads": 1}),
    "qwen3": ("plain", _ODD),
    "mistral": ("window", _ODD),
    "gemma2": ("plain", _ODD),
    "gemma3_text": ("plain", {**_ODD, "num_hidden_layers": 3}),
    "olmo2": ("groups, biases", _NO_HEAD),
    "cohere": ("plain", _ODD),
    "gpt_neox": ("plain", {**_OLD}),
    "phi": ("plain", {**_OLD, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "gpt2": ("plain", {"n_embd": 50, "n_head": 5, "n_inner": 70}),
    "qwen3_moe": ("plain", _EXPERTS),
    "gpt_oss": ("plain", _GROUPED),
    "olmoe": ("plain", {**_EXPERTS, "num_key_value_heads": 5}),
    "granitemoe": ("plain", _GROUPED),
}  # fmt: skip
# A class, and the arguments of its config.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTForCausalLM", {**_TOKENS, **_OLD, "ffn_dim": 50, "word_embed_proj_dim": 36,
                               "max_position_embeddings": 64, "init_std": 0.2}),
    "bloom": ("BloomForCausalLM", {**_TOKENS, "hidden_size": 36, "n_layer": 2, "n_head": 6,
                                   "initializer_range": 0.2}),
    "falcon": ("FalconForCausalLM", {**_TOKENS, **_OLD, "initializer_range": 0.2}),
    "mixtral": ("MixtralForCausalLM", {**_TOKENS, **_GROUPED, "num_local_experts": 6,
                                       "num_experts_per_tok": 2, "initializer_range": 0.2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_TOKENS, **_EXPERTS,
                                          "shared_expert_intermediate_size": 28,
                                          "initializer_range": 0.2}),
    "bert": ("BertForMaskedLM", _ENCODER),
    "roberta": ("RobertaForMaskedLM", {**_ENCODER, "type_vocab_size": 1}),
    "modernbert": ("ModernBertForMaskedLM", {**_ENCODER, "local_attention": 2 * WINDOW,
                                             "global_attn_every_n_layers": 2}),
    "t5": ("T5ForConditionalGeneration", {**_TOKENS, "d_model": 36, "d_kv": 6, "d_ff": 50,
           "num_layers": 2, "num_heads": 6, "decoder_start_token_id": 0,
           "initializer_factor": 1.0}),
    "bart": ("BartForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", {**_BART, "decoder_start_token_id": 0, "pad_token_id": 0}),
}  # fmt: skip
NAMES = [*CAUSAL, *OTHERS]
ENCODERS = {kind for kind, _ in OTHERS.values() if kind.endswith("MaskedLM")}
EXPERTS = ("qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "mixtral", "qwen2_moe")


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    # Changes of what is made in inference mode cannot be told.
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        if name in CAUSAL:
            variant, more = CAUSAL[name]
            made = model_of(random_config(name, variant, **more))
        else:
            kind, arguments = OTHERS[name]
            made = noisy_norms(seeded_model(kind, 3, **arguments))
        return made.to(dtype)


def texts(count: int) -> torch.Tensor:
    return torch.stack([random_tokens(LENGTH, seed) for seed in range(count)])
