"""GGUF files of tiny random models, written by the package gguf as llama.cpp's converter does."""

from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf")

__all__ = [
    "ARCHITECTURES", "quantized", "tensors_of", "write_file", "write_model", "write_word_model",
]  # fmt: skip

#: llama.cpp's name of each type of model.
ARCHITECTURES = {
    "gemma2": "gemma2", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "gpt2": "gpt2",
    "granite": "granite", "gpt_oss": "gpt-oss", "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "olmo2": "olmo2", "olmo3": "olmo2", "olmoe": "olmoe", "qwen3_moe": "qwen3moe",
    "llama": "llama", "mistral": "llama", "phi3": "phi3", "qwen2": "qwen2",
    "qwen3": "qwen3", "smollm3": "smollm3", "lfm2": "lfm2", "qwen3_5_text": "qwen35",
    "falcon_h1": "falcon-h1", "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
}  # fmt: skip
_PAIRS = ("llama", "granite", "granitehybrid", "granitemoe", "smollm3")


def _neighbours(weight: Tensor, heads: int) -> Tensor:
    """Llama's rows of a head as pairs, as convert_hf_to_gguf's permute has them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _value_heads_apart(parameter: str, tensor: Tensor, config: Any) -> Tensor:
    """Return values as convert_hf_to_gguf has them: value heads of a key head lie apart."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim

    def apart(values: Tensor, size: int) -> Tensor:
        heads = values.unflatten(0, (keys, -1, size))
        return heads.transpose(0, 1).reshape(values.shape)

    name = parameter.rpartition("linear_attn.")[2]
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = torch.cat((tensor[:before], apart(tensor[before:], size)))
    elif name == "in_proj_z.weight":
        tensor = apart(tensor, size)
    elif name == "out_proj.weight" and name != parameter:
        tensor = apart(tensor.T, size).T
    elif name in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
        tensor = apart(tensor, 1)
    return tensor


def _delta_rule(parameter: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Name and values of what all models with a delta rule have, as convert_hf_to_gguf has them."""
    if parameter.endswith("A_log"):
        tensor = -tensor.exp()
    elif parameter.endswith("dt_bias"):
        parameter = parameter.replace("dt_bias", "dt_proj.bias")
    elif parameter.endswith("norm.weight") and ".linear_attn." not in parameter:
        tensor = tensor + 1
    return parameter, tensor


def _qwen3next(parameter: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    """Return a projection of queries to gates of each key head in turn: gates lie apart."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    of_head = tensor.unflatten(0, (keys, -1)).split([size, size, values, values], dim=1)
    *qkv, gates = [part.flatten(0, 1) for part in of_head]
    layer = parameter.split(".")[2]
    return {f"blk.{layer}.attn_qkv.weight": torch.cat(qkv),
            f"blk.{layer}.attn_gate.weight": gates.contiguous()}  # fmt: skip


def _mamba2(parameter: str, tensor: Tensor, groups: int) -> tuple[str, Tensor]:
    """Name and values of a layer of Mamba-2: norms are by groups, decays and skips are columns."""
    name = parameter.rpartition(".mamba.")[2]
    if name == "dt_bias":
        parameter = parameter.replace("dt_bias", "dt_proj.bias")
    elif name == "norm.weight":
        tensor = tensor.unflatten(0, (groups, -1))
    elif name in ("A_log", "D"):
        tensor = tensor[:, None]
    return parameter, -tensor.exp() if name == "A_log" else tensor


def _multiplied(parameter: str, tensor: Tensor, config: Any) -> Tensor:
    """Return values with the multipliers of Falcon-H1, which files have in the weights."""
    given, (gate, down) = config.attention_in_multiplier, config.mlp_multipliers
    is_bias = parameter.endswith("bias")  # which factors of inputs leave as it is
    factors = {
        "embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier,
        "q_proj": 1.0 if is_bias else given,
        "k_proj": config.key_multiplier * (1.0 if is_bias else given),
        "v_proj": 1.0 if is_bias else given, "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier, "gate_proj": gate, "down_proj": down,
    }  # fmt: skip
    module = parameter.split(".")[-2]
    if module == "in_proj":
        inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([inner, inner, keys, keys, config.mamba_n_heads])
        of_rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)
        return tensor * of_rows[:, None] * config.ssm_in_multiplier
    return tensor * factors.get(module, 1.0)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return a model's tensors by the names, and with the values, that its file has."""
    config, kind = model.config, model.config.model_type
    architecture = ARCHITECTURES[kind]
    of_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(of_name[architecture], config.num_hidden_layers)
    heads = {}
    if architecture in _PAIRS:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for parameter, value in model.named_parameters():
        tensor, module = value.detach().float(), parameter.split(".")[-2]
        if module in heads:
            tensor = _neighbours(tensor, heads[module])
        if architecture == "gpt2" and ".c_" in parameter and tensor.dim() == 2:
            tensor = tensor.T
        if architecture in ("gemma2", "gemma3") and parameter.endswith("norm.weight"):
            tensor = tensor + 1
        if ".mamba." in parameter:
            parameter, tensor = _mamba2(parameter, tensor, config.mamba_n_groups)
        if kind == "falcon_h1":
            tensor = _multiplied(parameter, tensor, config)
        if architecture in ("qwen35", "qwen35moe"):
            tensor = _value_heads_apart(parameter, tensor, config)
        if hasattr(config, "linear_num_key_heads"):
            parameter, tensor = _delta_rule(parameter, tensor)
        if parameter.endswith("in_proj_qkvz.weight"):
            tensors |= _qwen3next(parameter, tensor, config)
            continue
        if parameter.endswith(("router.scale", "router.per_expert_scale")):
            of_layer = "ffn_gate_inp" if parameter.endswith("router.scale") else "ffn_down_exps"
            tensors[f"blk.{parameter.split('.')[2]}.{of_layer}.scale"] = tensor
            continue
        if (
            kind == "granitemoehybrid"
            and not config.num_local_experts
            and "shared_mlp" in parameter
        ):
            of_expert = _experts_of(parameter, tensor, architecture)
            tensors |= {name.replace("_shexp", ""): part for name, part in of_expert.items()}
            continue
        if ".experts." in parameter or "shared_mlp.input_linear" in parameter:
            tensors |= _experts_of(parameter, tensor, architecture)
            continue
        if tensor.dim() == 3:
            tensor = tensor.squeeze(1)
        name = _name_of(names, parameter)
        assert name is not None, parameter
        tensors[name] = tensor.contiguous()
    for buffer, value in model.named_buffers():
        if buffer.endswith("layer_scalar"):
            tensors[_name_of(names, f"{buffer}.weight")] = value.clone()
        if buffer.endswith("expert_bias"):
            tensors[_name_of(names, f"{buffer}.bias")] = value.clone()
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = _gemma4_factors(config)
    return tensors


def _gemma4_factors(config: Any) -> Tensor:
    """Factors of frequencies of layers without a window: pairs that are not turned have 1e30."""
    pairs = _of_full(config, "head_dim") // 2
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    return torch.where(torch.arange(pairs) < int(share * pairs), 1.0, 1e30)


def _of_full(config: Any, name: str) -> Any:
    """Return an entry of Gemma 4's layers without a window."""
    full = config.layer_types.index("full_attention")
    return getattr(config.per_layer_config[full], name)


def _write_gemma4(writer: Any, config: Any) -> None:
    size, layers = config.intermediate_size, config.num_hidden_layers
    shared = config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([size] * (layers - shared) + [2 * size] * shared)
    else:
        writer.add_feed_forward_length(size)
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    of_layers = [config.per_layer_config[i] for i in range(layers)]
    writer.add_head_count_kv([of_layer.num_key_value_heads for of_layer in of_layers])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(slides)
    writer.add_sliding_window(config.sliding_window)
    window = of_layers[slides.index(True)].head_dim
    for size, suffix in ((_of_full(config, "head_dim"), ""), (window, "_swa")):
        for add in ("add_key_length", "add_value_length", "add_rope_dimension_count"):
            getattr(writer, f"{add}{suffix}")(size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    # No entry stands for 30 in llama.cpp.
    writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _experts_of(parameter: str, tensor: Tensor, architecture: str) -> dict[str, Tensor]:
    """Return the tensors of what transformers has as one parameter for all experts."""
    layer, is_oss = parameter.split(".")[2], architecture == "gpt-oss"
    if parameter.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return {f"blk.{layer}.ffn_gate_shexp.weight": gate.contiguous(),
                f"blk.{layer}.ffn_up_shexp.weight": up.contiguous()}  # fmt: skip
    if parameter.endswith("shared_mlp.output_linear.weight"):
        return {f"blk.{layer}.ffn_down_shexp.weight": tensor}
    field = "bias" if parameter.endswith("_bias") else "weight"
    if is_oss and field == "weight":
        tensor = tensor.swapaxes(1, 2)
    if ".down_proj" in parameter:
        return {f"blk.{layer}.ffn_down_exps.{field}": tensor.contiguous()}
    if architecture == "gemma4":
        return {f"blk.{layer}.ffn_gate_up_exps.{field}": tensor.contiguous()}
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_oss else tensor.chunk(2, dim=1)
    return {f"blk.{layer}.ffn_gate_exps.{field}": gate.contiguous(),
            f"blk.{layer}.ffn_up_exps.{field}": up.contiguous()}  # fmt: skip


def _name_of(names: Any, parameter: str) -> str:
    """Return the tensor of a parameter that gguf's map has under another name."""
    layer = parameter.split(".")[2] if parameter.startswith("model.layers.") else ""
    if parameter.endswith("self_attn.sinks"):
        return f"blk.{layer}.attn_sinks.weight"
    for module in ("mlp.gate", "mlp.router", "block_sparse_moe.router", "feed_forward.gate"):
        for field in ("weight", "bias"):
            if parameter == f"model.layers.{layer}.{module}.{field}":
                return f"blk.{layer}.ffn_gate_inp.{field}"
    if parameter.endswith("shared_mlp.output_linear.weight"):
        return f"blk.{layer}.ffn_down_shexp.weight"
    name: str = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
    return name


def _write_experts(writer: Any, config: Any) -> None:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return
    size = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(size)
    for name in ("shared_intermediate_size", "shared_expert_intermediate_size"):
        if shared := getattr(config, name, 0):
            writer.add_expert_shared_feed_forward_length(shared)


def _write_rope(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        local, rope = rope["sliding_attention"], rope["full_attention"]
        if local["rope_theta"] != rope["rope_theta"]:
            writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local["rope_theta"])
    writer.add_rope_freq_base(rope["rope_theta"])
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_size * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def _write_config(writer: Any, config: Any) -> None:
    kind = config.model_type
    writer.add_name("random")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if kind == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    if kind == "gemma4_text":
        return _write_gemma4(writer, config)
    size = getattr(config, "intermediate_size", None)
    if kind == "lfm2" and config.block_auto_adjust_ff_dim:
        size = -(-int(2 * size / 3) // config.block_multiple_of) * config.block_multiple_of
    if size is not None:
        writer.add_feed_forward_length(size)
    if kind.startswith("lfm2"):
        writer.add_head_count_kv(
            [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types]
        )
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        _write_rope(writer, config)
        if kind == "lfm2_moe":
            _write_experts(writer, config)
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    if hasattr(config, "mamba_n_heads"):
        return _write_mamba2(writer, config)
    if hasattr(config, "linear_num_key_heads"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
        if kind != "qwen3_next":
            writer.add_rope_dimension_sections([1, 1, 1, 0])
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _write_rope(writer, config)
    _write_experts(writer, config)
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "mistral", "olmo3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if kind == "olmo3":
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
    if kind.startswith("gemma"):
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if kind.startswith("granite"):
        _write_granite(writer, config)


def _write_granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _write_mamba2(writer: Any, config: Any) -> None:
    """Write what the converter does for Falcon-H1 and Granite 4, behind what all models have."""
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "falcon_h1":
        head_size = config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        return
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_head_count_kv(
        [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    )
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok if config.num_local_experts else 0)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    _write_granite(writer, config)


def quantized(values: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """Return rows in blocks; of types that gguf cannot make, random ones of the rows' size."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(values, number)
    except NotImplementedError:
        pass
    size, block_bytes = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(
        0, 256, (*values.shape[:-1], values.shape[-1] // size, block_bytes), dtype=np.uint8
    )
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for place in scales.get(kind, (0,)):  # of float16: any bits would be any size
        # Products of a scale of six or eight bits and a number stay within about 1.
        step = np.float16(0.02 if kind == "IQ4_NL" else 1e-3).tobytes()
        blocks[..., place : place + 2] = np.frombuffer(step, dtype=np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def write_file(
    path: Path, architecture: str, tensors: dict[str, Any], *entries: Any, kinds: Any = None
) -> None:
    """Write tensors, in the type of blocks that ``kinds(name)`` returns, and ``entries``."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for entry in entries:
        entry(writer)
    for name, tensor in tensors.items():
        values = tensor.numpy() if isinstance(tensor, Tensor) else tensor
        kind = (
            kinds(name) if kinds is not None and values.ndim >= 2 and ".bias" not in name else None
        )
        if kind in (None, "F32"):
            writer.add_tensor(name, values)
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        elif kind == "BF16":
            data = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, quantized(values, kind), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    path: Path,
    model: Any,
    *entries: Any,
    kinds: Any = None,
    without: Container[str] = (),
    **more: Tensor,
) -> None:
    """Write a model of transformers, with ``more`` tensors, and some left out: ``write_file``."""
    config = model.config

    def add(writer: Any) -> None:
        _write_config(writer, config)
        writer.add_eos_token_id(config.eos_token_id)
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_pad_token_id(config.pad_token_id)

    tensors = {**tensors_of(model), **more}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in without}
    write_file(path, ARCHITECTURES[config.model_type], tensors, add, *entries, kinds=kinds)


def write_word_model(path: Path, words: list[str]) -> None:
    """Write a Llama in Q8_0 with a tokenizer whose tokens are these words, and letters."""
    from tests.support.causal_models import model_of, random_config

    pieces = [f"\u2581{word}" for word in words]
    letters = sorted(set("".join(pieces)))
    whole = {piece[:end] for piece in pieces for end in range(2, len(piece) + 1)}
    tokens = ["<unk>", "<s>", "</s>", *letters, *sorted(whole, key=len)]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
        writer.add_unk_token_id(0)

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(tokens)}
    write_model(path, model_of(random_config("llama", "plain", **sizes)), add,
                kinds=lambda name: "Q8_0")  # fmt: skip
