"""What modules of transformers 5.23 say of themselves, for those of transformers 5.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from lmdecode.readers.transformers.architecture import refused

__all__ = ["complete_modules"]


def _gpt2_scaling(attention: Any) -> float:
    scale = attention.head_dim**-0.5 if attention.scale_attn_weights else 1.0
    return scale / (attention.layer_idx + 1 if attention.scale_attn_by_inverse_layer_idx else 1)


def _gemma_scale(embedding: Any) -> torch.Tensor:
    return torch.tensor(embedding.embedding_dim**0.5, dtype=torch.float64, device="cpu")


# Type of model to the attribute that its modules lack, another one that tells these modules from
# others, and the value.
_ATTRIBUTES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "gpt2": ("scaling", "scale_attn_weights", _gpt2_scaling),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("conv_kernel_size", "L_cache", lambda m: m.L_cache)),
    **dict.fromkeys(("gemma", "gemma2"), ("embed_scale", "embedding_dim", _gemma_scale)),
    "falcon_h1": ("norm", "mamba_rms_norm", lambda mixer: None),
}  # fmt: skip


def complete_modules(model: Any) -> None:
    """Set the attributes that the modules of a model have in later releases alone.

    Raises ``ValueError`` for a model whose experts have another layout there.
    """
    config = model.config
    attribute, mark, value_of = _ATTRIBUTES.get(config.model_type, ("", "", None))
    for module in model.modules():
        if value_of is not None and hasattr(module, mark) and not hasattr(module, attribute):
            setattr(module, attribute, value_of(module))
        if config.model_type == "gpt_oss" and hasattr(module, "limit"):
            # Here the model does not look at its config for them.
            config.swiglu_alpha, config.swiglu_limit = module.alpha, module.limit
        if "ParallelExperts" in type(module).__name__:
            raise refused(
                f"model is a {type(model).__name__} of transformers {transformers.__version__}, "
                "which stores its experts in another layout; expected a later release"
            )
