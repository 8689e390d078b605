"""``attn_implementation="lmdecode"`` of transformers 5.x: sliding windows without a mask."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lmdecode.attention.ops import attention_op, sliding_window_attention
from lmdecode.integrations.transformers.caches.ring_states import RingStates

__all__ = ["attention_forward", "padding_mask", "register"]

_NAME = "lmdecode"
# Arguments of some models' layers that change which keys are seen, and how much. Their other
# arguments are contained in the mask, or say how to compute.
_UNSUPPORTED = ("block_indices", "cache", "indices", "position_bias", "sinks")
# Before transformers 5.3 masks are made from the positions of the queries, not from their number.
_FROM_POSITIONS = "cache_position" in signature(sdpa_mask).parameters


def register() -> None:
    """Make ``attn_implementation="lmdecode"`` known to transformers, for any model.

    A model is loaded with it, or changed by ``model.set_attn_implementation("lmdecode")``. The
    model must support ``flash_attention_2``, as such models pass on their windows. There are no
    gradients, no dropout and no attention weights. It also registers ``"lmdecode_flash"``, for
    ``model.generate_batch``.
    """
    AttentionInterface.register(_NAME, attention_forward)
    AttentionMaskInterface.register(
        _NAME, _mask_from_positions if _FROM_POSITIONS else padding_mask
    )
    with suppress(ImportError):  # an earlier transformers with another continuous batching
        from lmdecode.integrations.transformers.continuous_batching.attention import register_flash

        register_flash()


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask of padding keys, which ``attention_forward`` takes beside the window.

    transformers calls this function as an ``AttentionMaskInterface``.

    Returns None if no visible key is padding; on a GPU, steps of one token are not checked.
    Otherwise ``[batch, tokens so far]`` bool, True for a token, with a column for each position
    from the first on. A static cache causes a second call with the result of the first, which
    returns it unchanged. If the keys of a static cache reach farther than the tokens, the result is
    always such a mask, as its width gives the number of tokens. Masks other than causal windows
    (packed sequences, blocks of an image, chunks, the caller's masks) have four dimensions,
    ``[batch, 1, q_length or 1, kv_length]`` bool.
    """
    is_chunked = local_size is not None and local_size == getattr(
        config, "attention_chunk_size", None
    )
    is_causal_window = allow_is_causal_skip or (q_length == 1 and not use_vmap)
    if allow_is_bidirectional_skip and local_size is None:
        if attention_mask is None or bool(attention_mask.all()):
            return None
        return attention_mask[:, None, None, kv_offset : kv_offset + kv_length]
    if allow_is_bidirectional_skip or is_chunked or not is_causal_window:
        options: dict[str, Any] = dict(q_length=q_length, q_offset=int(q_offset), device=device)
        if _FROM_POSITIONS:
            positions = torch.arange(q_length, device=device) + q_offset
            options = dict(cache_position=positions)
        if mask_function is not None:
            options |= dict(mask_function=mask_function)
        return sdpa_mask(
            batch_size, kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask,
            local_size=local_size, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, use_vmap=use_vmap, **options,
        )  # fmt: skip
    end = int(q_offset) + q_length
    is_static = kv_offset + kv_length > end
    if attention_mask is None:
        return torch.ones(batch_size, end, dtype=torch.bool, device=device) if is_static else None
    mask = attention_mask[:, :end]
    if mask.shape[1] < end:
        mask = nn.functional.pad(mask, (0, end - mask.shape[1]))  # as transformers has it
    # In a step the host does not wait for a GPU to check it: a row of padding costs less.
    is_looked_at = not is_static and (q_length > 1 or mask.device.type == "cpu")
    if is_looked_at and bool(mask[:, kv_offset:].all()):
        return None
    return mask


def _mask_from_positions(batch_size: int, cache_position: Tensor, **options: Any) -> Tensor | None:
    """Return the mask of padding keys for the arguments of transformers before 5.3."""
    return padding_mask(
        batch_size, len(cache_position), q_offset=cache_position[0],
        device=cache_position.device, **options,
    )  # fmt: skip


def _check(query: Tensor, dropout: float, others: dict[str, Any]) -> None:
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "lmdecode attention: query requires a gradient, and there is none; call the model "
            "under torch.no_grad(), or train with another attn_implementation"
        )
    if dropout:
        raise ValueError(f"lmdecode attention: dropout is {dropout}; expected 0")
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(
                f"lmdecode attention: {name} was given; expected none: this model needs another "
                "attn_implementation"
            )


def attention_forward(
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
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by ``lmdecode.sliding_window_attention`` and ``sliding_window_decode``.

    transformers calls this function as an ``AttentionInterface``. Queries, keys and values are
    ``[batch, heads, tokens, head_size]``, keys and values not repeated; those in a ring are read in
    place. ``attention_mask`` is from ``padding_mask``, or has four dimensions and replaces the
    window. ``sliding_window`` counts the query's own key. ``s_aux`` are the ``sinks`` of
    ``sliding_window_attention``. If ``is_causal`` is None, the module's holds.

    Returns ``[batch, tokens, heads, head_size]``, and None for the weights. Raises ValueError in
    training, for an unsupported argument, and if the cache holds a smaller window.
    """
    _check(query, dropout, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    query = _autocast(query)
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=s_aux)
    if attention_mask is not None and attention_mask.dim() == 4:
        mask = attention_mask[..., : key.shape[2]]
        out = sliding_window_attention(
            query, _autocast(key), _autocast(value), attn_mask=mask, mask_convention="visible",
            **options,
        )  # fmt: skip
        return _transposed(out), None
    if isinstance(key, RingStates) and is_causal and key.ring.window == sliding_window:
        rows, dtype = query, key.ring.dtype
        if rows.dtype != dtype:  # the ring is read in place
            rows = query.to(dtype)
        out = _transposed(key.attend(rows, key_padding_mask=attention_mask, **options))
        return (out if rows is query else out.to(query.dtype)), None
    if isinstance(key, RingStates) and sliding_window and key.ring.window < sliding_window:
        raise ValueError(
            f"lmdecode attention: sliding_window is {sliding_window}; expected at most "
            f"{key.ring.window}, the window of the cache: make it with the config of the model"
        )
    if attention_mask is not None:
        seen, held = attention_mask.shape[1], key.shape[2]
        if held > seen:  # a static cache that is not full
            key, value = key[:, :, :seen], value[:, :, :seen]
        attention_mask = attention_mask[:, max(0, seen - held) :]
    if is_causal:
        options |= dict(window=sliding_window)
    else:
        # A window of this size to both sides, the query not counted.
        window = None if sliding_window is None else sliding_window + 1
        options |= dict(window=window, window_right=sliding_window)
    states = query, _autocast(key), _autocast(value)
    attend = attention_op(query.shape[2])
    return _transposed(attend(*states, key_padding_mask=attention_mask, **options)), None


def _autocast(tensor: Tensor) -> Tensor:
    """Return queries, keys or values as torch's attention casts them where autocast is on."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _transposed(out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)
