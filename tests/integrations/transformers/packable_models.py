"""A tiny random model of each type that transformers generates text with."""

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES})
_VOCAB = 101
# Attributes of configs by size; a config gets those that it has.
_SIZES = {
    0: "pad_token_id",
    1: "bos_token_id n_group topk_group n_groups",
    2: "eos_token_id num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_key_value_heads num_experts_per_tok "
    "linear_num_key_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads mamba_n_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads",
    8: "mamba_d_state state_size rotary_dim",
    16: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "q_lora_rank kv_lora_rank",
    64: "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim "
    "decoder_hidden_size",
    96: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim d_inner dim_ff",
    _VOCAB: "vocab_size",
    128: "max_position_embeddings n_positions n_ctx max_seq_len",
}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 16,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": _VOCAB,
}  # fmt: skip
# What sizes alone do not give; None is left to the config.
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "layer_types": None, "mamba_n_heads": 8,
              "mamba_d_head": 16},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"layer_types": None, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {**_GEMMA4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    "gemma4_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8,
                         "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "layer_types": None,
              "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "prophetnet": {"num_hidden_layers": None},
    "recurrent_gemma": {"num_hidden_layers": 3, "layer_types": None, "lru_width": 64},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1,
              "layer_types": None, "n_mamba_heads": 2, "attention_hidden_size": 128},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
IDS = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))


def _sizes(config: Any) -> dict[str, Any]:
    found = {}
    for size, names in _SIZES.items():
        for name in names.split():
            kept = getattr(type(config), name, None)
            if isinstance(kept, property) and kept.fset is None:
                continue
            try:
                value = getattr(config, name)
            except Exception:  # there is none, or it differs between layers
                continue
            if value is None or isinstance(value, int):
                found[name] = size
    if "qk_rope_head_dim" in found:  # one key of all heads, compressed
        found["num_key_value_heads"] = 4
    kinds = getattr(config, "layer_types", None)
    if kinds and not isinstance(getattr(type(config), "layer_types", None), property):
        kinds = list(dict.fromkeys(kinds))
        kinds = kinds if len(kinds) > 1 else kinds * 2
        found |= {"layer_types": kinds}
        found |= {name: len(kinds) for name in ("num_hidden_layers", "n_layer") if name in found}
    return found


def build(kind: str, **more: Any) -> Any:
    """Return a float32 model in evaluation mode, of some 100,000 parameters."""
    cls = CONFIG_MAPPING[kind]
    default = cls()
    arguments = _sizes(default)
    for part in getattr(cls, "sub_configs", {}):
        config = getattr(default, part, None)
        if hasattr(config, "to_dict"):
            arguments[part] = {**_sizes(config), "model_type": config.model_type}
    for name, value in {**_MORE.get(kind, {}), **more}.items():
        arguments[name] = value
        if value is None:
            del arguments[name]
    auto = transformers.AutoModelForSeq2SeqLM
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        auto = transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return auto.from_config(cls(**arguments), dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return those behind ``IDS``, [2, 9, vocab]."""
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, **more).logits
