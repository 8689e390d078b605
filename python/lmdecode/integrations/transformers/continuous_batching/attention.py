"""``attn_implementation="lmdecode_flash"``: attention over continuous batching's paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, modeling_flash_attention_utils

from lmdecode.attention.ops import sliding_window_attention

# transformers lets implementations into its continuous batching whose names hold "flash".
NAME = "lmdecode_flash"


def register_flash() -> None:
    """Make ``attn_implementation="lmdecode_flash"`` known to transformers."""
    AttentionInterface.register(NAME, paged_attention_forward)
    _let_models_be_set_to_it()


def _let_models_be_set_to_it() -> None:
    # Before a model is set to a name that holds "flash", transformers imports a package of this
    # name for its functions, registered or not. Here there are none to import.
    utils = modeling_flash_attention_utils
    others = getattr(utils, "_lazy_imports", None)
    if others is None or getattr(others, "_knows_lmdecode", False):
        return

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return None, None, None, None, None
        return others(implementation, *args, **kwargs)

    lazy_imports._knows_lmdecode = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the requests of a batch, one after the other in memory, as a ragged batch.

    Transformers calls it as an ``AttentionInterface`` of a causal layer. ``query``, ``key`` and
    ``value`` are [1, heads, tokens, head_size] of all requests, keys and values of the new tokens;
    the queries of each request begin at ``cu_seq_lens_q``, [requests + 1]. ``cache`` is a
    ``PagedAttentionCache``, which stores the new keys and returns the visible ones; None where the
    layer has called it before, as those of transformers 5.24 do. ``softcap`` and ``s_aux`` are
    ``softcap`` and ``sinks`` of ``sliding_window_attention``. Returns [1, tokens, heads,
    head_size], and None for the weights. Raises ValueError without the cache of continuous
    batching, and for dropout.
    """
    # The cache changes these arguments: cu_seq_lens_k becomes that of the layer.
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx, kwargs)
    if cu_seq_lens_q is None or not isinstance(kwargs.get("cu_seq_lens_k"), Tensor):
        raise ValueError(
            f"lmdecode attention: attn_implementation is '{NAME}', which is for continuous "
            "batching alone, and there is no paged cache; expected 'lmdecode' here"
        )
    if dropout:
        raise ValueError(f"lmdecode attention: dropout is {dropout}; expected 0")
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    out = sliding_window_attention(
        *rows,
        window=sliding_window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        cu_seqlens_q=cu_seq_lens_q.to(torch.int32),
        cu_seqlens_kv=kwargs["cu_seq_lens_k"],
    )
    assert isinstance(out, Tensor)
    return out[None], None
