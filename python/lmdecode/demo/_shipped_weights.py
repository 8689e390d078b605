"""The shipped language model as lmdecode's config and weights, read without transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import lmdecode
from lmdecode.demo._output import require
from lmdecode.serving.tokenizer import read_json

__all__ = ["pack_shipped_model"]


def pack_shipped_model(folder: Path) -> lmdecode.Decoding:
    """Pack the weights of the folder in float32. Of Mistral's switches, it uses the plain ones."""
    config = read_json(folder / "config.json")
    file = require("safetensors").safe_open(folder / "model.safetensors", framework="pt")

    def weight(name: str) -> Tensor:
        return file.get_tensor(f"model.{name}.weight").float()

    def layer(number: int) -> lmdecode.CausalLayerWeights:
        attention, ffn = f"layers.{number}.self_attn", f"layers.{number}.mlp"
        weights = dict.fromkeys(lmdecode.CausalLayerWeights._fields)
        weights |= {
            "attention_norm_gamma": weight(f"layers.{number}.input_layernorm"),
            "qkv": torch.cat([weight(f"{attention}.{name}_proj") for name in "qkv"]),
            "attention_out": weight(f"{attention}.o_proj"),
            "ffn_norm_gamma": weight(f"layers.{number}.post_attention_layernorm"),
            **{f"ffn_{name}": weight(f"{ffn}.{name}_proj") for name in ("gate", "up", "down")},
        }
        return lmdecode.CausalLayerWeights(**weights)  # type: ignore[arg-type]

    layers, head_size = config["num_hidden_layers"], config["head_dim"]
    turns = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    sizes = lmdecode.CausalConfig(
        num_layers=layers,
        model_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_size=head_size,
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        windows=(config["sliding_window"],) * layers,
        rotary=(0,) * layers,
        rotary_scales=(1.0,),
        norm_epsilon=config["rms_norm_eps"],
    )
    weights = lmdecode.CausalWeights(
        embedding=weight("embed_tokens"),
        positions=None,
        rotary=(1.0 / config["rope_parameters"]["rope_theta"] ** turns,),
        final_norm_gamma=weight("norm"),
        final_norm_beta=None,
        logits=None,  # the embedding
        logits_bias=None,
        layers=[layer(number) for number in range(layers)],
    )
    return lmdecode.Decoding(sizes, weights)
