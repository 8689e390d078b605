"""Where transformers' parameters are in a GGUF file: names, and what llama.cpp does to values."""

from __future__ import annotations

import re

__all__ = ["IGNORED", "PERMUTED", "PLUS_ONE", "tensor_name"]

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
# Architectures with a name of its own for the norm behind the attention, or for that before the
# feed-forward layer.
_NORM_BEHIND = (
    "gemma2", "gemma3", "gemma4", "gpt-oss", "olmo2", "qwen35", "qwen35moe", "qwen3next",
)  # fmt: skip
# Parameters of a layer whose tensors' names have no ending, or another.
_OWN = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "pre_ff_layernorm.weight": "ffn_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_OF_OWN = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, _OWN))})")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)")

#: Architectures whose rows of queries and keys llama.cpp has in pairs, rather than in halves.
PERMUTED = ("granite", "granitehybrid", "granitemoe", "llama", "smollm3")
#: Architectures whose norms llama.cpp has as 1 + weight, the delta rule's excepted.
PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
#: Tensors that are no parameters.
IGNORED = ("rope_freqs.weight",)


def tensor_name(parameter: str, architecture: str) -> str:
    """Return the name of a parameter's tensor.

    Parameters
    ----------
    parameter
        Its name in a model of transformers that one of ``CONFIGS`` gives.
    architecture
        That of the file.
    """
    if (own := _OF_OWN.fullmatch(parameter)) is not None:
        return f"blk.{own[1]}.{_OWN[own[2]]}"
    found = _LAYER.fullmatch(parameter)
    if found is None:
        module, _, field = parameter.rpartition(".")
        return f"{_WHOLE[module]}.{field}"
    layer, module, field = found.groups()
    name = _OF_LAYER[module]
    if module == "post_attention_layernorm" and architecture in _NORM_BEHIND:
        name = "post_attention_norm"
    return f"blk.{layer}.{name}.{field}"
