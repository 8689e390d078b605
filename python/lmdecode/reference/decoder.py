"""A decoder, the search of FasterTransformer, and gather_tree, again in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lmdecode.models.configs import CausalConfig, DecoderConfig, EncoderConfig
from lmdecode.models.weights import (
    CausalLayerWeights,
    DecoderWeights,
    EncoderLayerWeights,
    LayerWeights,
    bias_of_layer,
)

__all__ = [
    "activated",
    "decoder_layer",
    "decoder_logits",
    "dynamic_time_warping",
    "faster_transformer_decoder",
    "faster_transformer_decoding",
    "feed_forward",
    "gather_tree",
    "normed",
    "residual",
    "self_attention",
    "timestamp_rule",
]

Config = DecoderConfig | EncoderConfig | CausalConfig
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of rows, a weight and its bias


def normed(config: Config, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    """Apply the config's norm (LayerNorm or RMSNorm) to x; a gamma of None is 1."""
    if config.norm == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], gamma, beta, config.norm_epsilon)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_epsilon)
    return x if gamma is None else x * gamma


def residual(
    config: DecoderConfig | EncoderConfig,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    sublayer: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return x plus a sublayer's output, with the norm before the sublayer or after the sum."""
    if config.norm_first:
        return x + sublayer(normed(config, x, gamma, beta))
    return normed(config, x + sublayer(x), gamma, beta)


def activated(config: Config, x: Tensor) -> Tensor:
    """Apply the config's activation function to x."""
    if config.activation == "gelu":
        return F.gelu(x)
    if config.activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.silu(x) if config.activation == "silu" else F.relu(x)


def feed_forward(
    config: Config,
    w: LayerWeights | EncoderLayerWeights | CausalLayerWeights,
    x: Tensor,
    linear: Linear = F.linear,
) -> Tensor:
    """Apply the feed-forward layer to x."""
    assert w.ffn_up is not None and w.ffn_down is not None
    inner = linear(x, w.ffn_up, w.ffn_up_bias)
    if config.gated:
        assert w.ffn_gate is not None
        inner = activated(config, linear(x, w.ffn_gate, w.ffn_gate_bias)) * inner
    else:
        inner = activated(config, inner)
    return linear(inner, w.ffn_down, w.ffn_down_bias)


def _heads(config: DecoderConfig | EncoderConfig, x: Tensor) -> Tensor:
    """[B, T, heads * head_size] to [B, heads, T, head_size]."""
    return x.view(*x.shape[:2], config.num_heads, config.head_size).transpose(1, 2)


def _attend(
    config: DecoderConfig | EncoderConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    factor_dtype: torch.dtype | None = None,
) -> Tensor:
    """[B, T, heads * size] of each; visible, None: all, broadcasts to [B, heads, T, S] scores.

    Both products are of factors rounded to factor_dtype, if it is given.
    """

    def rounded(x: Tensor) -> Tensor:
        return x if factor_dtype is None else x.to(factor_dtype).to(x.dtype)

    assert config.attention_scale is not None
    q, k, v = (rounded(_heads(config, x)) for x in (q, k, v))
    if k.shape[2] == 0:
        return torch.zeros_like(q).transpose(1, 2).flatten(2)
    scores = (q * config.attention_scale) @ k.transpose(2, 3)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
    divisor = weights.sum(dim=-1, keepdim=True)
    if isinstance(config, DecoderConfig):
        divisor = divisor + config.denominator_epsilon
    out = (rounded(weights) / divisor.masked_fill(divisor == 0, 1.0)) @ v
    return out.transpose(1, 2).flatten(2)


def self_attention(
    config: DecoderConfig | EncoderConfig,
    w: LayerWeights | EncoderLayerWeights,
    x: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    linear: Linear = F.linear,
    factor_dtype: torch.dtype | None = None,
) -> Tensor:
    """Apply self-attention to x, [B, T, D]; visible masks the scores, bias is added to them.

    What attention multiplies is rounded to factor_dtype, if it is given.
    """
    q, k, v = linear(x, w.qkv, w.qkv_bias).chunk(3, dim=-1)
    attended = _attend(config, q, k, v, visible, bias, factor_dtype)
    return linear(attended, w.self_out, w.self_out_bias)


def _relative_bias(relative_bias: Tensor | None, length: int) -> Tensor | None:
    """[heads, T, T] of queries and keys."""
    if relative_bias is None:
        return None
    places = torch.arange(length)
    distance = (places[:, None] - places[None]).clamp(min=0)
    return relative_bias[:, distance]


def decoder_layer(
    config: DecoderConfig,
    w: LayerWeights,
    x: Tensor,
    memory: Tensor,
    lengths: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Apply a decoder layer to sequences ``x`` [B, T, D].

    ``memory`` is [B, S, M] with ``lengths`` [B]. ``bias`` [heads, T (queries), T (keys)] is added
    to the scores of self-attention.
    """

    def cross_attention(x: Tensor) -> Tensor:
        q = F.linear(x, w.cross_query, w.cross_query_bias)
        k, v = F.linear(memory, w.cross_key_value, w.cross_key_value_bias).chunk(2, dim=-1)
        there = (torch.arange(memory.shape[1]) < lengths[:, None])[:, None, None]
        return F.linear(_attend(config, q, k, v, there, None), w.cross_out, w.cross_out_bias)

    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    own = partial(self_attention, config, w, visible=causal, bias=bias)
    x = residual(config, x, w.self_norm_gamma, w.self_norm_beta, own)
    x = residual(config, x, w.cross_norm_gamma, w.cross_norm_beta, cross_attention)
    return residual(config, x, w.ffn_norm_gamma, w.ffn_norm_beta, partial(feed_forward, config, w))


def decoder_logits(
    config: DecoderConfig,
    weights: DecoderWeights,
    tokens: Tensor,
    memory: Tensor,
    memory_lengths: Tensor,
) -> Tensor:
    """Return the logits [B, T, V] after each of the ``tokens`` [B, T] int64, in float32 or float64.

    ``memory`` [B, S, M] is the encoder's output, of which the first ``memory_lengths`` [B] count.
    """
    steps = tokens.shape[1]
    x = weights.embedding[tokens] * config.embedding_scale
    if weights.positions is not None:
        places = weights.positions[config.position_offset :][:steps].expand(x.shape)
        if config.unplaced_token is not None:
            places = places.masked_fill((tokens == config.unplaced_token)[..., None], 0)
        x = x + places
    if weights.embedding_norm_gamma is not None:
        x = normed(config, x, weights.embedding_norm_gamma, weights.embedding_norm_beta)
    for number, layer in enumerate(weights.layers):
        bias = _relative_bias(bias_of_layer(config, weights.relative_bias, number), steps)
        x = decoder_layer(config, layer, x, memory, memory_lengths, bias)
    if weights.final_norm_gamma is not None:
        x = normed(config, x, weights.final_norm_gamma, weights.final_norm_beta)
    return F.linear(x, weights.logits, weights.logits_bias)


# ---- FasterTransformer v2.0, by its contract (docs/reference/decoder.md)

_LN_EPSILON, _SOFTMAX_EPSILON = 1e-6, 1e-6


def _ft_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, head_num: int, size_per_head: int
) -> Tensor:
    """[R, D] queries to [R, N, D] keys, of which lengths [R] count."""
    rows, count = k.shape[:2]
    heads = (head_num, size_per_head)
    scores = torch.einsum("rhd,rnhd->rhn", q.view(rows, *heads), k.view(rows, count, *heads))
    scores = scores / math.sqrt(size_per_head)
    scores = scores.masked_fill(torch.arange(count) >= lengths[:, None, None], -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
    weights = weights / (weights.sum(dim=-1, keepdim=True) + _SOFTMAX_EPSILON)
    return torch.einsum("rhn,rnhd->rhd", weights, v.view(rows, count, *heads)).flatten(1)


def faster_transformer_decoder(
    from_tensor: Tensor,
    memory_tensor: Tensor,
    memory_sequence_length: Tensor,
    weights: Sequence[Tensor],
    old_self_cache: Tensor,
    old_mem_cache: Tensor,
    *,
    head_num: int,
    size_per_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``lmdecode.compat.faster_transformer.decoder``."""
    heads = (head_num, size_per_head)
    (
        beta1, gamma1, wq, bq, wk, bk, wv, bv, wo, bo,
        beta2, gamma2, xq, xbq, xk, xbk, xv, xbv, xo, xbo,
        beta3, gamma3, w1, b1, w2, b2,
    ) = weights  # fmt: skip
    x = from_tensor[:, 0]
    rows, size = x.shape
    step = old_self_cache.shape[1]

    def norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return F.layer_norm(x, (size,), gamma, beta, _LN_EPSILON)

    n1 = norm(x, gamma1, beta1)
    self_cache, mem_cache = old_self_cache.clone(), old_mem_cache.clone()
    self_cache[0, -1], self_cache[1, -1] = n1 @ wk + bk, n1 @ wv + bv
    keys, values = self_cache.transpose(1, 2)
    own = _ft_attention(n1 @ wq + bq, keys, values, torch.full((rows,), step), *heads)
    a = x + own @ wo + bo
    n2 = norm(a, gamma2, beta2)
    if step == 1:
        mem_cache[0], mem_cache[1] = memory_tensor @ xk + xbk, memory_tensor @ xv + xbv
    keys, values = mem_cache
    cross = _ft_attention(n2 @ xq + xbq, keys, values, memory_sequence_length, *heads)
    c = a + cross @ xo + xbo
    n3 = norm(c, gamma3, beta3)
    y = c + F.relu(n3 @ w1 + b1) @ w2 + b2
    return y[:, None], self_cache, mem_cache


def sinusoid(step: int, size: int) -> Tensor:
    """Return [size]: the position encoding of a step, counted from 1; 0 after an odd size."""
    half = size // 2
    rates = torch.exp(
        torch.arange(half, dtype=torch.float64) * (-math.log(10000.0) / max(half - 1, 1))
    )
    odd = torch.zeros(size % 2)
    return torch.cat((torch.sin(step * rates), torch.cos(step * rates), odd)).float()


def faster_transformer_decoding(
    memory_tensor: Tensor,
    memory_sequence_length: Tensor,
    weights: Sequence[Sequence[Tensor]],
    embedding_table: Tensor,
    decoding_beta: Tensor,
    decoding_gamma: Tensor,
    embedding_kernel: Tensor,
    embedding_bias: Tensor,
    *,
    batch_size: int,
    beam_width: int,
    max_seq_len: int,
    head_num: int,
    size_per_head: int,
    start_id: int,
    end_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``lmdecode.compat.faster_transformer.decoding``."""
    heads = {"head_num": head_num, "size_per_head": size_per_head}
    vocab, size = embedding_table.shape
    rows, own = batch_size * beam_width, torch.arange(batch_size * beam_width)
    source, zeros = memory_tensor.shape[1], memory_tensor.new_zeros
    self_caches = [zeros(2, 0, rows, size) for _ in weights]
    mem_caches = [zeros(2, rows, source, size) for _ in weights]
    scores = memory_tensor.new_full((batch_size, beam_width), -1e20)
    scores[:, 0] = 0.0
    words, finished = torch.full((rows,), start_id), torch.zeros(rows, dtype=torch.bool)
    lengths = torch.zeros(rows, dtype=torch.int64)
    output_ids = torch.full((max_seq_len, rows), end_id, dtype=torch.int32)
    parent_ids = own.to(torch.int32).repeat(max_seq_len, 1)
    for step in range(1, max_seq_len + 1):
        x = embedding_table[words] * math.sqrt(size) + sinusoid(step, size)
        for number, layer in enumerate(weights):
            grown = torch.cat((self_caches[number], zeros(2, 1, rows, size)), dim=1)
            out, self_caches[number], mem_caches[number] = faster_transformer_decoder(
                x[:, None], memory_tensor, memory_sequence_length, layer, grown,
                mem_caches[number], **heads,
            )  # fmt: skip
            x = out[:, 0]
        x = F.layer_norm(x, (size,), decoding_gamma, decoding_beta, _LN_EPSILON)
        log_probs = torch.log_softmax(x @ embedding_kernel + embedding_bias, dim=-1)
        log_probs[finished] = -torch.inf
        log_probs[finished, end_id] = 0.0
        total = (log_probs.view(batch_size, beam_width, vocab) + scores[..., None]).flatten(1)
        # A stable sort, and not topk: ties go to the lowest flat index.
        scores, flat = (part[:, :beam_width] for part in total.sort(descending=True, stable=True))
        first = torch.arange(batch_size)[:, None] * beam_width
        parents, words = (first + flat // vocab).flatten(), (flat % vocab).flatten()
        lengths = (lengths + (~finished).long())[parents]
        finished = words == end_id
        output_ids[step - 1], parent_ids[step - 1] = words.int(), parents.int()
        self_caches = [cache[:, :, parents] for cache in self_caches]
        if bool(finished.all()):
            break
    return output_ids, parent_ids, lengths.int()


def gather_tree(
    step_ids: Tensor, parent_ids: Tensor, max_sequence_lengths: Tensor, end_token: int
) -> Tensor:
    """See ``lmdecode.gather_tree``."""
    steps, batch, beams = step_ids.shape
    result = torch.full_like(step_ids, end_token)
    for b in range(batch):
        length = min(int(max_sequence_lengths[b]), steps)
        for w in range(beams):
            beam = w
            for step in reversed(range(length)):
                result[step, b, w] = step_ids[step, b, beam]
                beam = int(parent_ids[step, b, beam])
            ends = (result[:length, b, w] == end_token).nonzero()
            if len(ends):
                result[int(ends[0]) :, b, w] = end_token
    return result


def dynamic_time_warping(cost: Tensor) -> Tensor:
    """Return the frame in which each token begins, [tokens] int64, on the cheapest monotonic path.

    ``cost`` is [tokens, frames] float32. A step of the path is one token on, one frame on, or both.
    Of equal sums, which are rounded to float32, the frame on is taken, unless both is less than
    either.
    """
    tokens, frames = cost.shape
    sums = torch.full((tokens + 1, frames + 1), torch.inf)
    sums[0, 0] = 0.0
    steps = torch.zeros(tokens, frames, dtype=torch.int64)
    for token in range(tokens):
        for frame in range(frames):
            both, by_token = float(sums[token, frame]), float(sums[token, frame + 1])
            by_frame = float(sums[token + 1, frame])
            if both < by_token and both < by_frame:
                least, step = both, 0
            elif by_token < both and by_token < by_frame:
                least, step = by_token, 1
            else:
                least, step = by_frame, 2
            sums[token + 1, frame + 1] = float(cost[token, frame]) + least
            steps[token, frame] = step
    first = torch.zeros(tokens, dtype=torch.int64)
    token, frame = tokens - 1, frames - 1
    while token >= 0:
        first[token] = max(frame, 0)
        step = int(steps[token, frame]) if frame >= 0 else 1
        token -= step != 2
        frame -= step != 1
    return first


def timestamp_rule(
    scores: Tensor, sequences: Tensor, first: int, end: int, begin: int, last_initial: int
) -> Tensor:
    """Return scores [rows, V], -inf where Whisper's rules of timestamps forbid a token.

    ``scores`` are logits or log-probabilities, after all other rules, and ``sequences`` are [rows,
    length] int64. The numbers are those of ``TokenRules.timestamps``.
    """
    scores, tokens = scores.clone(), torch.arange(scores.shape[1])
    is_time = tokens >= first
    scores[:, first - 1] = -torch.inf
    for row, sequence in zip(scores, sequences, strict=True):
        new = sequence[begin:].tolist()
        times = [token for token in new if token >= first]
        ends_in_time = bool(new) and new[-1] >= first
        is_pair = len(new) < 2 or new[-2] >= first
        if ends_in_time and is_pair:
            row[is_time] = -torch.inf
        elif ends_in_time:
            row[tokens < end] = -torch.inf
        if times:
            earliest = times[-1] + (0 if ends_in_time and not is_pair else 1)
            row[is_time & (tokens < earliest)] = -torch.inf
        if len(sequence) == begin:
            row[~is_time] = -torch.inf
            if last_initial >= 0:
                row[tokens > last_initial] = -torch.inf
        if row[is_time].double().logsumexp(0) > row[~is_time].max():
            row[~is_time] = -torch.inf
    return scores
