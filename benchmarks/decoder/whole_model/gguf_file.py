"""A model folder of transformers as a GGUF file, float32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf_header import write_sizes

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def _neighbours(weight: Any, heads: int) -> Any:
    """Order the rows of a projection so that neighbouring pairs rotate, not halves of a head.

    That is what GGUF's "llama" does; its "qwen2" rotates halves, as transformers.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _frequency_factors(config: dict[str, Any], head_size: int) -> Any:
    """Return what Llama 3 divides each rotary frequency by, [head_size / 2] float32."""
    scaling = config["rope_scaling"]
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    length = scaling["original_max_position_embeddings"]
    factors = []
    for pair in range(head_size // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / head_size)
        smooth = min(1.0, max(0.0, (length / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _write_header(writer: Any, config: dict[str, Any], head_size: int) -> None:
    import gguf

    writer.add_name("random")
    write_sizes(
        writer,
        model_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        key_heads=config["num_key_value_heads"],
        head_size=head_size,
        ffn_size=config["intermediate_size"],
        vocab=config["vocab_size"],
        epsilon=config["rms_norm_eps"],
        rope_base=config["rope_theta"],
        length=config["max_position_embeddings"],
    )
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def write_gguf(folder: Path, file: Path) -> None:
    """Write a Qwen2 or a Llama with a tied head."""
    import gguf
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    pairs = {"attn_q": heads, "attn_k": kv_heads} if kind == "llama" else {}
    writer = gguf.GGUFWriter(str(file), kind)
    _write_header(writer, config, head_size)
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", _frequency_factors(config, head_size))
    for part in sorted(folder.glob("*.safetensors")):
        with safe_open(part, "np") as tensors:
            for key in tensors.keys():
                value = tensors.get_tensor(key)
                if key in _WHOLE:
                    name = _WHOLE[key]
                else:
                    _, _, layer, rest = key.split(".", 3)
                    module, _, field = rest.rpartition(".")
                    if _NAMES[module] in pairs:
                        value = _neighbours(value, pairs[_NAMES[module]])
                    name = f"blk.{layer}.{_NAMES[module]}.{field}"
                writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
