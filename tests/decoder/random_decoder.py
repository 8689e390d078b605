"""Random decoders of any kind, and a search by the reference."""

from typing import Any

import torch

from lmdecode.models.configs import DecoderConfig
from lmdecode.models.weights import DecoderWeights, LayerWeights

KINDS: dict[str, dict[str, Any]] = {
    "post_norm": {"activation": "relu"},
    "pre_norm_gated": {
        "norm_first": True,
        "gated": True,
        "activation": "gelu_tanh",
        "unplaced_token": 7,
    },
    "rms": {"norm": "rms_norm", "norm_first": True, "activation": "silu", "attention_scale": 1.0},
    "gelu": {"activation": "gelu", "embedding_scale": 3.0, "denominator_epsilon": 1e-6},
}


def random_decoder(
    kind: str, *, seed: int = 0, vocab: int = 40, layers: int = 2, heads: int = 3, head: int = 10
) -> tuple[DecoderConfig, DecoderWeights]:
    """Return a decoder whose sizes are no multiples of a vector."""
    torch.manual_seed(seed)
    config = DecoderConfig(
        num_layers=layers,
        model_size=22,
        num_heads=heads,
        head_size=head,
        ffn_size=34,
        vocab_size=vocab,
        memory_size=18,
        position_offset=2,
        **KINDS[kind],
    )
    size, attention = config.model_size, config.attention_size
    with_beta = config.norm == "layer_norm"

    def linear(out: int, inner: int) -> torch.Tensor:
        return torch.randn(out, inner) * inner**-0.5

    def gamma() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size)

    def beta() -> torch.Tensor | None:
        return 0.1 * torch.randn(size) if with_beta else None

    def layer() -> LayerWeights:
        gate = linear(config.ffn_size, size) if config.gated else None
        return LayerWeights(
            gamma(), beta(), linear(3 * attention, size), torch.randn(3 * attention) * 0.1,
            linear(size, attention), None,
            gamma(), beta(), linear(attention, size), None,
            linear(2 * attention, 18), torch.randn(2 * attention) * 0.1,
            linear(size, attention), torch.randn(size) * 0.1,
            gamma(), beta(), linear(config.ffn_size, size), None, gate, None,
            linear(size, config.ffn_size), torch.randn(size) * 0.1,
        )  # fmt: skip

    is_first = config.norm_first
    weights = DecoderWeights(
        embedding=torch.randn(vocab, size),
        positions=None if config.norm == "rms_norm" else torch.randn(90, size) * 0.3,
        relative_bias=torch.randn(heads, 64) if config.norm == "rms_norm" else None,
        embedding_norm_gamma=None if is_first else gamma(),
        embedding_norm_beta=None if is_first else beta(),
        final_norm_gamma=gamma() if is_first else None,
        final_norm_beta=beta() if is_first else None,
        logits=linear(vocab, size) * 2,
        logits_bias=torch.randn(vocab),
        layers=tuple(layer() for _ in range(layers)),
    )
    return config, weights
