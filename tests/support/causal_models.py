"""Tiny random decoder-only models of every architecture, which exercise each of its switches."""

import functools
from typing import Any

import torch
import transformers

from tests.support.releases import needs_rope_type, needs_type

VOCAB, PAD, BOS, EOS = 101, 0, 1, 2
WINDOW = 7
POSITIONS = 256
# Types whose norms multiply by 1 + weight.
_PLUS_ONE = ("gemma", "qwen3_5", "qwen3_next")
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
# Behind random_tokens(20, 0 to 3), 130 tokens of greedy search: two best logits differ by 2e-4.
SEED = 5

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
    "max_position_embeddings": POSITIONS, "hidden_size": 32, "intermediate_size": 44,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 0.02,  # large enough to be seen
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_GROUP_OF_7 = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
_GROUP_OF_1 = {"num_key_value_heads": 4}
_GROUP_OF_4 = {"num_key_value_heads": 1}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


_YARN = {"factor": 8.0, "original_max_position_embeddings": 32}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
_GEMMA3 = {
    **_GEMMA,
    "num_hidden_layers": 3,
    "layer_types": _ALTERNATING,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 3.0},
    },
}
# Layers with a window and without, in that order, the last two with the keys of others.
_GEMMA4 = {
    "head_dim": 12, "global_head_dim": 20, "sliding_window": WINDOW, "num_hidden_layers": 5,
    "layer_types": [*_ALTERNATING, "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 10,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 4.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip
_GEMMA4_DENSE = {
    **_GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_key_value_heads": 4,
}  # fmt: skip
_GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20,
    "use_double_wide_mlp": False,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
    "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 0.01,
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.21, "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}  # fmt: skip

_LFM2 = {
    "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "block_multiple_of": 4,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "head_dim": 12, "linear_key_head_dim": 10, "linear_value_head_dim": 6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1],
    },
}  # fmt: skip
_DELTA_LAST = {
    "num_hidden_layers": 3, "layer_types": ["full_attention", *["linear_attention"] * 2],
    "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 40,
    "linear_num_value_heads": 2, "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip
_DENSE = {"mlp_only_layers": [0, 1, 2, 3]}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_MAMBA = {
    "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_head": 8,
    "mamba_d_state": 10, "mamba_chunk_size": 16, "shared_intermediate_size": 28,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip

# What each variant of an architecture sets, beside the sizes above.
_FALCON = {
    "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2,
    "mamba_d_state": 10, "mamba_chunk_size": 16, "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.6, "mlp_multipliers": [0.8, 0.7], "key_multiplier": 0.6,
    "attention_out_multiplier": 0.7, "attention_in_multiplier": 1.3, "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.8, 1.1, 0.9, 1.2], "ssm_in_multiplier": 1.2,
}  # fmt: skip

# Sizes of models with a layer norm.
_EPSILON = {"layer_norm_eps": 0.02}
_COHERE = {**_EPSILON, "logit_scale": 0.7}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {},
        "biases, tied, wide heads": {
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 20,
        },
        "group of 7, gelu": {**_GROUP_OF_7, "hidden_act": "gelu"},
        "linear": _rope("linear", factor=2.5),
        "proportional": _rope("proportional", partial_rotary_factor=0.5),
        "llama3": _rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        "yarn": _rope("yarn", **_YARN),
        "yarn, attention factor": _rope("yarn", attention_factor=0.7, beta_fast=16.0, **_YARN),
        "yarn, mscale": _rope("yarn", mscale=1.0, mscale_all_dim=0.5, **_YARN),
    },
    "mistral": {
        "window": {"sliding_window": WINDOW},
        "no window, group of 4": {"sliding_window": None, "head_dim": 6, **_GROUP_OF_4},
    },
    "qwen2": {
        "plain, group of 7": {**_GROUP_OF_7, "tie_word_embeddings": True},
        "last layers slide": {
            "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
        "layer types": {
            "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
        },
    },
    "qwen3": {
        "plain": {"head_dim": 12, "tie_word_embeddings": True},
        "biases, layer types, yarn": {
            "head_dim": 12, "attention_bias": True, "num_hidden_layers": 3,
            "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _ALTERNATING,
            **_rope("yarn", **_YARN), **_GROUP_OF_1,
        },
    },
    "gemma2": {
        "plain": {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
        "no caps, biases, untied": {
            **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "attention_bias": True, "tie_word_embeddings": False, "hidden_activation": "silu",
            **_GROUP_OF_4,
        },
    },
    "gemma3_text": {
        "plain": _GEMMA3,
        "capped": {**_GEMMA3, "final_logit_softcapping": 4.0, "attention_bias": True},
    },
    "gemma3": {"text part": _GEMMA3},
    "gemma4_text": {
        "shared keys, inputs of layers": _GEMMA4,
        "values are keys, biases, untied": {
            **_GEMMA4_DENSE, "attention_bias": True, "tie_word_embeddings": False,
            "final_logit_softcapping": None, "hidden_activation": "silu",
        },
        "all experts": {**_GEMMA4_DENSE, **_GEMMA4_EXPERTS, "top_k_experts": 6},
        "experts, shared keys, inputs of layers": {
            **_GEMMA4, **_GEMMA4_EXPERTS, "num_global_key_value_heads": 4,
            "attention_k_eq_v": True, "use_bidirectional_attention": "vision",
        },
        "no window, all keys of one": {
            **_GEMMA4, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3,
        },
    },
    "gemma4": {"text part": _GEMMA4},
    "phi3": {
        "plain": _GROUP_OF_1,
        "partial, window": {"partial_rotary_factor": 0.5, "sliding_window": WINDOW},
    },
    "smollm3": {
        "layers without positions": {"num_hidden_layers": 4},
        "these slide, biases": {
            "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "use_sliding_window": True,
            "sliding_window": WINDOW, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "lfm2": {
        "convolutions at the ends": _LFM2,
        "attention last, two taps, untied": {
            **_LFM2, "layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 2,
            "tie_word_embeddings": False, "block_auto_adjust_ff_dim": False, **_GROUP_OF_4,
        },
    },
    "qwen3_5_text": {
        "plain": _DELTA,
        "delta rule last, biases": {**_DELTA, **_DELTA_LAST},
    },
    "lfm2_moe": {
        "plain": {**_LFM2, **_EXPERTS, "num_dense_layers": 0},
        "a dense layer, no bias, scale, attention last": {
            **_LFM2, **_EXPERTS, "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 1, "use_expert_bias": False, "norm_topk_prob": False,
            "routed_scaling_factor": 1.3, "tie_word_embeddings": False, **_GROUP_OF_4,
        },
    },
    "qwen3_5": {"text part": _DELTA},
    "qwen3_5_moe_text": {
        "plain": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 28},
        "delta rule last, biases": {
            **_DELTA, **_DELTA_LAST, **_EXPERTS, "shared_expert_intermediate_size": 52,
        },
    },
    "qwen3_5_moe": {
        "text part": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 28},
    },
    "qwen3_next": {
        "experts and dense layers": {
            **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1],
        },
        "dense": {**_DELTA, **_DENSE},
        "dense, delta rule last": {**_DELTA, **_DELTA_LAST, **_DENSE},
    },
    "olmo2": {
        "plain": _GROUP_OF_1,
        "groups, biases": {"attention_bias": True, "tie_word_embeddings": True},
    },
    "olmo3": {
        "plain": {**_GROUP_OF_1, "num_hidden_layers": 4, "sliding_window": WINDOW},
        "two kinds of rotary, groups, biases": {
            "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3,
            "sliding_window": WINDOW, "layer_types": _ALTERNATING,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                # The factor is yarn's own, as in all published models.
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 900.0, **_YARN,
                    "attention_factor": 1.2079441541679836,
                },
            },
        },
    },
    "granite": {
        "plain": {},
        "multipliers, biases": {**_MULTIPLIERS, "attention_bias": True, "mlp_bias": True},
    },
    "qwen3_moe": {
        "plain": {"head_dim": 12, **_EXPERTS},
        "normalized, dense layers, window": {
            "head_dim": 12, **_EXPERTS, "norm_topk_prob": True, "num_hidden_layers": 5,
            "decoder_sparse_step": 2, "mlp_only_layers": [3], "use_sliding_window": True,
            "sliding_window": WINDOW, "attention_bias": True, "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
        "few of many": {**_EXPERTS, "num_experts": 40, "num_experts_per_tok": 5},
    },
    "gpt_oss": {
        "plain": {
            "head_dim": 12, **_LOCAL_EXPERTS, "num_hidden_layers": 3, "sliding_window": WINDOW,
            **_rope("yarn", truncate=False, beta_fast=32.0, beta_slow=1.0, **_YARN),
        },
        "all experts, tight limits": {
            **_LOCAL_EXPERTS, "num_experts_per_tok": 6, "sliding_window": WINDOW,
            "swiglu_limit": 0.4, "swiglu_alpha": 0.9, "attention_bias": False,
            "tie_word_embeddings": True, **_GROUP_OF_4, **_rope("default"),
        },
    },
    "olmoe": {
        "plain": {**_EXPERTS, "clip_qkv": None},
        "normalized, biases": {
            **_EXPERTS, "norm_topk_prob": True, "attention_bias": True, **_GROUP_OF_1,
        },
    },
    "granitemoe": {
        "plain": {**_LOCAL_EXPERTS, "attention_multiplier": 0.25},
        "multipliers, biases": {**_LOCAL_EXPERTS, **_MULTIPLIERS, "attention_bias": True},
    },
    "falcon_h1": {
        "multipliers": _FALCON,
        "norm behind the gate, biases": {
            **_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
            "projectors_bias": True, "attention_bias": True, "mlp_bias": True, **_GROUP_OF_4,
        },
        "norm before the gate, tied": {
            **_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True,
            "mamba_conv_bias": False, "mamba_d_conv": 3, "tie_word_embeddings": True,
        },
    },
    "granitemoehybrid": {
        "experts, multipliers": {**_MAMBA, **_LOCAL_EXPERTS, **_MULTIPLIERS},
        "dense, attention last, rotary, biases": {
            **_MAMBA, "num_local_experts": 0, "position_embedding_type": "rope",
            "attention_bias": True, "attention_multiplier": 0.3, "mamba_n_groups": 1,
            "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_conv_bias": False, "mamba_d_conv": 2,
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            **_GROUP_OF_4,
        },
    },
    "granitemoeshared": {
        "shared": {**_LOCAL_EXPERTS, **_MULTIPLIERS, "shared_intermediate_size": 28},
    },
    "cohere": {
        "plain": _COHERE,
        "biases, untied, gelu": {
            **_COHERE, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "gelu",
            **_GROUP_OF_1,
        },
    },
    "cohere2": {
        "plain": {**_COHERE, "num_hidden_layers": 4, "sliding_window": WINDOW},
        "biases, untied, groups": {
            **_COHERE, "num_hidden_layers": 3, "sliding_window": WINDOW,
            "layer_types": _ALTERNATING, "attention_bias": True, "tie_word_embeddings": False,
            **_GROUP_OF_4,
        },
    },
    "gpt_neox": {
        "plain": {**_EPSILON, **_GROUP_OF_1},
        "one after the other, no biases, all turned, tied": {
            **_EPSILON, **_GROUP_OF_1, "use_parallel_residual": False, "attention_bias": False,
            "tie_word_embeddings": True, **_rope("default", partial_rotary_factor=1.0),
        },
    },
    "phi": {
        "plain": {**_EPSILON, **_GROUP_OF_1},
        "groups, tied": {**_EPSILON, "tie_word_embeddings": True},
    },
    "gpt2": {
        "plain": {},
        "scales of layers, relu, untied": {
            "scale_attn_by_inverse_layer_idx": True, "n_layer": 3, "n_inner": 40, "n_head": 2,
            "activation_function": "relu", "tie_word_embeddings": False,
        },
        "odd heads, no scale": {
            "n_embd": 30, "n_head": 6, "scale_attn_weights": False, "activation_function": "gelu",
        },
    },
}  # fmt: skip
CASES = [(kind, variant) for kind, variants in VARIANTS.items() for variant in variants]


def _config(architecture: str, arguments: dict[str, Any]) -> Any:
    needs_type(architecture)
    needs_rope_type(arguments.get("rope_parameters", {}).get("rope_type", "default"))
    if architecture == "gpt2":
        return transformers.GPT2Config(**{**_GPT2, **arguments})
    arguments = {**SIZES, **arguments}
    if architecture == "gemma3":
        vision = {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
        }  # fmt: skip
        return transformers.Gemma3Config(
            text_config=arguments, vision_config=vision, mm_tokens_per_image=4,
            image_token_index=VOCAB - 1, boi_token_index=VOCAB - 2, eoi_token_index=VOCAB - 3,
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        )  # fmt: skip
    if architecture == "gemma4":
        vision = {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4,
        }  # fmt: skip
        return transformers.Gemma4Config(
            text_config=arguments, vision_config=vision, image_token_id=VOCAB - 1,
            boi_token_id=VOCAB - 2, eoi_token_id=VOCAB - 3, pad_token_id=PAD, bos_token_id=BOS,
            eos_token_id=EOS,
        )  # fmt: skip
    if architecture in _WITH_IMAGES:
        vision = {
            "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
            "patch_size": 4, "out_hidden_size": arguments["hidden_size"],
        }  # fmt: skip
        return transformers.AutoConfig.for_model(
            architecture, text_config=arguments, vision_config=vision,
            image_token_id=VOCAB - 1, video_token_id=VOCAB - 2, vision_start_token_id=VOCAB - 3,
            tie_word_embeddings=arguments["tie_word_embeddings"],
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        )  # fmt: skip
    return transformers.AutoConfig.for_model(architecture, **arguments)


def random_config(architecture: str, variant: str, **more: Any) -> Any:
    """Return the config of one of ``CASES``, with ``more`` entries."""
    return _config(architecture, {**VARIANTS[architecture][variant], **more})


def model_of(config: Any, seed: int = SEED) -> Any:
    """Return a float32 model with no parameter 0 or 1 throughout and logits of some units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = transformers.AutoModelForCausalLM
        if config.model_type in _WITH_IMAGES:
            kind = transformers.AutoModelForImageTextToText
        model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if id(parameter) in embeddings:
                    parameter.normal_(std=0.5)
                elif parameter.dim() == 3 and ".experts." in name:
                    parameter.normal_(std=1.5 * min(parameter.shape[1:]) ** -0.5)
                elif parameter.dim() == 2 and name.endswith("bias"):
                    parameter.normal_(std=0.2)
                elif parameter.dim() == 2:
                    size = 3.0 if name == "lm_head.weight" else 1.5
                    parameter.normal_(std=size * min(parameter.shape) ** -0.5)
                elif name.endswith(("model.norm.weight", "ln_f.weight")):
                    is_plus_one = config.model_type.startswith(_PLUS_ONE)
                    parameter.normal_().sub_(
                        float(is_plus_one and "gemma4" not in config.model_type)
                    )
                elif name.endswith("A_log"):
                    # transformers' prompts lose digits where states decay fast: they divide decays.
                    parameter.normal_(std=0.5).sub_(1.0)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.normal_(std=0.2)
                elif name.endswith("layer_scalar"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


@functools.cache
def random_model(architecture: str, variant: str, seed: int = SEED) -> Any:
    """Return the model of one of ``CASES``; tests share it."""
    return model_of(random_config(architecture, variant), seed)


def random_tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Return [length] int64, none of which is special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(EOS + 1, VOCAB - 3, (length,), generator=generator)
