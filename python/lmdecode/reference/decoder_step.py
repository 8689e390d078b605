"""The ops of a decoder's step in plain torch: their CPU versions, and the tests' oracle.

Layouts of caches are those of ``lmdecode.decoder.state.DecodingCaches``, for one layer; row r of a
step is cache row r. Products and caches are of one dtype, the residual stream, norms and softmax
float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "decoder_activate_",
    "decoder_add_norm_",
    "decoder_cross_attention",
    "decoder_cross_cache_",
    "decoder_embed",
    "decoder_self_attention_",
]

_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    1: functional.relu,
    2: functional.gelu,
    3: lambda x: functional.gelu(x, approximate="tanh"),
    4: functional.silu,
}


def _weights(scores: Tensor, visible: Tensor, epsilon: float) -> Tensor:
    """Softmax over the last dimension, with an epsilon in its denominator; 0 where nothing is."""
    scores = scores.masked_fill(~visible, -torch.inf)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(())
    exponentials = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    divisor = exponentials.sum(-1, keepdim=True) + epsilon
    return torch.where(divisor == 0.0, 0.0, exponentials / divisor)


def decoder_self_attention_(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    scale: float,
    denominator_epsilon: float,
    *,
    out: Tensor,
) -> None:
    """Write this step's keys and values, and attend to those of the row's sequence.

    ``qkv`` is [rows, 3, heads, head size]. Keys and values, [rows, heads, capacity, padded head],
    are written at ``positions`` [rows] int32; a position out of range gives 0 and writes nothing.
    ``table`` [rows, capacity] int32 is the cache row of each position before; it never names
    another row that writes this position now, which rows at one position cannot do. ``bias``
    [heads, distances] float32 is by the distance from the query back to the key. Scores are
    multiplied by ``scale``, and ``denominator_epsilon`` is added to the sum that softmax divides
    by. ``out`` is [rows, heads, head size].
    """
    rows, _, _, head_size = qkv.shape
    capacity = keys.shape[2]
    if bias is not None and bias.shape[1] < capacity:
        raise ValueError(f"bias has {bias.shape[1]} distances; expected at least {capacity}")
    own, places = torch.arange(rows), torch.arange(capacity)
    inside = (positions >= 0) & (positions < capacity)
    position = positions.long().clamp(0, max(capacity - 1, 0))
    written = own[inside]
    for cache, number in ((keys, 1), (values, 2)):
        padded = functional.pad(qkv[:, number], (0, cache.shape[3] - head_size))
        cache[written, :, position[inside]] = padded[inside]
    entries = table.long()
    entries = torch.where((entries < 0) | (entries >= rows), own[:, None], entries)
    entries = torch.where(places == position[:, None], own[:, None], entries)
    visible = (places <= position[:, None]) & inside[:, None]

    def read(cache: Tensor) -> Tensor:
        """Return [rows, heads, capacity, head size], 0 where nothing is read."""
        states = cache[entries, :, places][..., :head_size].float().transpose(1, 2)
        return states.masked_fill(~visible[:, None, :, None], 0.0)

    scores = torch.einsum("rhd,rhtd->rht", qkv[:, 0].float() * scale, read(keys))
    if bias is not None:
        distances = (position[:, None] - places).clamp(min=0)
        scores = scores + bias[:, distances].transpose(0, 1)
    weights = _weights(scores, visible[:, None], denominator_epsilon)
    out.copy_(torch.einsum("rht,rhtd->rhd", weights, read(values)))


def decoder_cross_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float,
    denominator_epsilon: float,
    *,
    out: Tensor,
) -> None:
    """Attend to the memory of each row's request; see ``decoder_self_attention_``.

    ``queries`` and ``out`` are [rows, heads, head size]; the rows of a request are neighbours, as
    many for each. ``keys`` are [requests, heads, padded head, source], ``values`` [requests, heads,
    source, padded head]. Of these the first ``lengths`` [requests] int64 count; if none, ``out`` is
    0.
    """
    rows, heads, head_size = queries.shape
    requests, source = keys.shape[0], keys.shape[3]
    grouped = queries.view(requests, rows // max(requests, 1), heads, head_size).float() * scale
    visible = (torch.arange(source) < lengths[:, None])[:, None, None]
    places = visible.view(requests, 1, source, 1)
    memory_keys = keys[:, :, :head_size].float().masked_fill(~visible, 0.0)
    memory_values = values[..., :head_size].float().masked_fill(~places, 0.0)
    scores = torch.einsum("brhd,bhds->bhrs", grouped, memory_keys)
    weights = _weights(scores, visible, denominator_epsilon)
    out.copy_(torch.einsum("bhrs,bhsd->brhd", weights, memory_values).reshape(out.shape))


def decoder_cross_cache_(key_value: Tensor, keys: Tensor, values: Tensor) -> None:
    """Lay out ``key_value`` [requests, length, 2, heads, head size], with 0 after it.

    ``keys`` are [requests, heads, padded head, source], ``values`` [requests, heads, source, padded
    head].
    """
    length, head_size = key_value.shape[1], key_value.shape[4]
    keys.zero_()
    values.zero_()
    keys[:, :, :head_size, :length] = key_value[:, :, 0].permute(0, 2, 3, 1)
    values[:, :, :length, :head_size] = key_value[:, :, 1].transpose(1, 2)


def decoder_add_norm_(
    x: Tensor,
    delta: Tensor | None,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    epsilon: float,
    rms_norm: bool,
    norm_first: bool,
    *,
    out: Tensor,
) -> None:
    """Add ``delta`` [rows, size] and ``bias`` [size] to the residual stream, and norm it.

    ``x`` [rows, size] float32 becomes the sum, and, unless ``norm_first``, its norm. ``out`` [rows,
    size] is the norm; without ``gamma`` there is none. ``epsilon`` is added to the variance.
    """
    for term in (delta, bias):
        if term is not None:
            x += term
    normed = x
    if gamma is not None:
        centered = x if rms_norm else x - x.mean(-1, keepdim=True)
        variance = (centered * centered).mean(-1, keepdim=True)
        normed = centered / (variance + epsilon).sqrt() * gamma
        if beta is not None:
            normed = normed + beta
    out.copy_(normed)
    if not norm_first:
        x.copy_(normed)


def decoder_embed(
    tokens: Tensor,
    positions: Tensor,
    embedding: Tensor,
    position_table: Tensor | None,
    scale: float,
    position_offset: int,
    *,
    x: Tensor,
) -> None:
    """Embed the ``tokens`` [rows] int64 of a step into ``x`` [rows, size] float32.

    Rows of ``embedding`` [vocab, size] are multiplied by ``scale``. Row ``position_offset`` of
    ``position_table`` [positions, size] float32 is added at position 0. A token or position out of
    range adds 0.
    """

    def rows_of(weights: Tensor, indices: Tensor) -> Tensor:
        inside = (indices >= 0) & (indices < len(weights))
        return weights[indices.where(inside, 0)].float().masked_fill(~inside[:, None], 0.0)

    x.copy_(rows_of(embedding, tokens) * scale)
    if position_table is not None:
        x += rows_of(position_table, positions.long() + position_offset)


def decoder_activate_(up: Tensor, gate: Tensor | None, activation: int) -> None:
    """Apply an activation to ``up`` [rows, size], by its number in ``linear.ACTIVATIONS``.

    With a ``gate`` [rows, size], ``up`` becomes ``activation(gate) * up``.
    """
    function = _ACTIVATIONS[activation]
    value = up.float()
    up.copy_(function(value) if gate is None else function(gate.float()) * value)
