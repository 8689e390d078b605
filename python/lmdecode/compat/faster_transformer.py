"""The ``decoder`` and ``decoding`` ops of FasterTransformer v2.0, by their contract, on the CPU.

Tensors, weights and results are those of its TensorFlow ops; docs/reference/decoder.md has the
contract, and what of that version's faults and limits is not here. Kernels are ``[in, out]``:
``x @ kernel``.
``gather_tree`` is that of ``lmdecode``: it takes what ``decoding`` returns, parents modulo the beam
width, as [max_seq_len, batch_size, beam_width].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lmdecode._checks import check_int, dtype_name, type_error
from lmdecode._ops import ops
from lmdecode.decoder.layer import gather_tree
from lmdecode.decoder.state import DecodingCaches, new_caches, padded
from lmdecode.models.configs import DecoderConfig
from lmdecode.models.packed_stack import PackedDecoder, packed_layer
from lmdecode.models.weights import DecoderWeights, LayerWeights

__all__ = ["decoder", "decoding", "gather_tree"]

_EPSILON = 1e-6
_NAMES = (
    "self_beta self_gamma self_q_kernel self_q_bias self_k_kernel self_k_bias self_v_kernel "
    "self_v_bias self_out_kernel self_out_bias cross_beta cross_gamma cross_q_kernel cross_q_bias "
    "cross_k_kernel cross_k_bias cross_v_kernel cross_v_bias cross_out_kernel cross_out_bias "
    "ffn_beta ffn_gamma ffn_kernel_1 ffn_bias_1 ffn_kernel_2 ffn_bias_2"
).split()


def _check(op: str, name: str, tensor: object, shape: Sequence[int | None]) -> Tensor:
    """Return a float32 or integer CPU tensor of this shape; None stands for any size."""
    if not isinstance(tensor, Tensor):
        raise type_error(op, name, tensor, "a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{op}: {name} has layout {tensor.layout}; expected a dense tensor")
    fits = tensor.dim() == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = [-1 if size is None else size for size in shape]
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}; expected {expected}, -1 for any size"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"{op}: {name} is on {tensor.device}; expected cpu")
    return tensor


def _floats(op: str, name: str, tensor: object, shape: Sequence[int | None]) -> Tensor:
    checked = _check(op, name, tensor, shape)
    if checked.dtype != torch.float32:
        raise ValueError(f"{op}: {name} has dtype {dtype_name(checked)}; expected float32")
    return checked


def _lengths(op: str, tensor: object, rows: int, source: int) -> Tensor:
    lengths = _check(op, "memory_sequence_length", tensor, (rows,))
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"{op}: memory_sequence_length is {lengths.dtype}; expected integers")
    if rows and not 0 <= int(lengths.min()) <= int(lengths.max()) <= source:
        raise ValueError(
            f"{op}: memory_sequence_length is {lengths.tolist()}; expected 0 to {source}, the "
            "positions of memory_tensor"
        )
    return lengths.to(torch.int64)


def _sizes(op: str, **sizes: object) -> tuple[int, ...]:
    return tuple(check_int(op, name, size, 1) for name, size in sizes.items())


def _layer(op: str, weights: Sequence[Tensor], size: int, memory_size: int) -> LayerWeights:
    if not isinstance(weights, Sequence):
        raise type_error(op, "weights", weights, "a sequence")
    if len(weights) != len(_NAMES):
        raise ValueError(f"{op}: weights has {len(weights)} tensors; expected {len(_NAMES)}")
    given = dict(zip(_NAMES, weights, strict=True))
    inner = _check(op, "ffn_bias_1", given["ffn_bias_1"], (None,)).shape[0]
    shapes: dict[str, tuple[int | None, ...]] = {name: (size,) for name in _NAMES}
    shapes |= {name: (size, size) for name in _NAMES if name.endswith("_kernel")}
    shapes |= {name: (memory_size, size) for name in ("cross_k_kernel", "cross_v_kernel")}
    shapes |= {"ffn_kernel_1": (size, inner), "ffn_bias_1": (inner,), "ffn_kernel_2": (inner, size)}
    w = {name: _floats(op, name, tensor, shapes[name]) for name, tensor in given.items()}

    def joined(part: str, *kinds: str) -> tuple[Tensor, Tensor]:
        return (
            torch.cat([w[f"{part}_{kind}_kernel"].T for kind in kinds]),
            torch.cat([w[f"{part}_{kind}_bias"] for kind in kinds]),
        )

    qkv, qkv_bias = joined("self", "q", "k", "v")
    key_value, key_value_bias = joined("cross", "k", "v")
    return LayerWeights(
        self_norm_gamma=w["self_gamma"],
        self_norm_beta=w["self_beta"],
        qkv=qkv,
        qkv_bias=qkv_bias,
        self_out=w["self_out_kernel"].T,
        self_out_bias=w["self_out_bias"],
        cross_norm_gamma=w["cross_gamma"],
        cross_norm_beta=w["cross_beta"],
        cross_query=w["cross_q_kernel"].T,
        cross_query_bias=w["cross_q_bias"],
        cross_key_value=key_value,
        cross_key_value_bias=key_value_bias,
        cross_out=w["cross_out_kernel"].T,
        cross_out_bias=w["cross_out_bias"],
        ffn_norm_gamma=w["ffn_gamma"],
        ffn_norm_beta=w["ffn_beta"],
        ffn_up=w["ffn_kernel_1"].T,
        ffn_up_bias=w["ffn_bias_1"],
        ffn_gate=None,
        ffn_gate_bias=None,
        ffn_down=w["ffn_kernel_2"].T,
        ffn_down_bias=w["ffn_bias_2"],
    )


def _config(
    layers: Sequence[LayerWeights],
    head_num: int,
    size_per_head: int,
    memory_size: int,
    vocab_size: int = 1,
) -> DecoderConfig:
    size = head_num * size_per_head
    return DecoderConfig(
        num_layers=len(layers),
        model_size=size,
        num_heads=head_num,
        head_size=size_per_head,
        ffn_size=layers[0].ffn_up.shape[0],
        vocab_size=vocab_size,
        memory_size=memory_size,
        norm_first=True,
        norm_epsilon=_EPSILON,
        denominator_epsilon=_EPSILON,
        embedding_scale=math.sqrt(size),
    )


def _positions(steps: int, size: int) -> Tensor:
    """Return [steps, size]: sines in the first half, cosines in the second, steps from 1."""
    half = size // 2
    rates = torch.exp(
        torch.arange(half, dtype=torch.float64, device="cpu")
        * (-math.log(10000.0) / max(half - 1, 1))
    )
    angles = torch.arange(1, steps + 1, dtype=torch.float64, device="cpu")[:, None] * rates
    table = torch.zeros(steps, size, dtype=torch.float32, device="cpu")
    table[:, :half], table[:, half : 2 * half] = angles.sin(), angles.cos()
    return table


def _by_heads(tensor: Tensor, heads: int, capacity: int) -> Tensor:
    """[R, T, D] to [1, R, heads, capacity, padded head]."""
    rows, count, size = tensor.shape
    head = size // heads
    result = torch.zeros(1, rows, heads, capacity, padded(head), dtype=torch.float32, device="cpu")
    result[0, :, :, :count, :head] = tensor.view(rows, count, heads, head).transpose(1, 2)
    return result


@torch.no_grad()
def decoder(
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
    """Run one decoder layer for one step.

    Parameters
    ----------
    from_tensor : Tensor
        [R, 1, D] float32, D = head_num * size_per_head.
    memory_tensor : Tensor
        [R, S, Dm] float32, read in the first step, where its keys and values are computed.
    memory_sequence_length : Tensor
        [R] integers, 0 to S.
    weights : sequence of Tensor
        26, float32: self beta, gamma, q kernel, q bias, k kernel, k bias, v kernel, v bias, out
        kernel, out bias; cross beta, gamma and the same eight; ffn beta, gamma, kernel 1, bias 1,
        kernel 2, bias 2.
    old_self_cache : Tensor
        [2, t, R, D] float32, keys and values; t is the step, and the last slot is for it.
    old_mem_cache : Tensor
        [2, R, S, D] float32, keys and values of the memory; read from the second step on.
    head_num, size_per_head : int
        Any.

    Returns
    -------
    tuple of Tensor
        decoder_output [R, 1, D], new_self_cache and new_mem_cache, as the old ones.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected.
    """
    op = "decoder"
    head_num, size_per_head = _sizes(op, head_num=head_num, size_per_head=size_per_head)
    size = head_num * size_per_head
    x = _floats(op, "from_tensor", from_tensor, (None, 1, size))
    rows = x.shape[0]
    memory = _floats(op, "memory_tensor", memory_tensor, (rows, None, None))
    source, memory_size = memory.shape[1:]
    lengths = _lengths(op, memory_sequence_length, rows, source)
    self_cache = _floats(op, "old_self_cache", old_self_cache, (2, None, rows, size)).clone()
    mem_cache = _floats(op, "old_mem_cache", old_mem_cache, (2, rows, source, size)).clone()
    step = self_cache.shape[1]
    if step < 1:
        raise ValueError(f"{op}: old_self_cache has 0 steps; expected at least 1, this step's")
    layer = _layer(op, weights, size, memory_size)
    config = _config([layer], head_num, size_per_head, memory_size)
    if step == 1:
        with torch.autocast("cpu", enabled=False):
            flat = torch.nn.functional.linear(
                memory, layer.cross_key_value, layer.cross_key_value_bias
            )
        mem_cache[0], mem_cache[1] = flat[..., :size], flat[..., size:]
    keys, values = self_cache.transpose(1, 2)
    own = torch.arange(rows, dtype=torch.int32, device="cpu")
    cross_keys, cross_values = mem_cache
    wide = padded(source)
    caches = DecodingCaches(
        _by_heads(keys, head_num, step),
        _by_heads(values, head_num, step),
        _by_heads(cross_keys, head_num, wide).transpose(3, 4).contiguous(),
        _by_heads(cross_values, head_num, wide),
        lengths,
        own[:, None].expand(rows, step).contiguous(),
        torch.zeros(rows, dtype=torch.int64, device="cpu"),
    )
    output = ops.decoder_layer(
        x[:, 0].contiguous(),
        packed_layer(config, layer, "float32").memory,
        torch.empty(0, dtype=torch.float32, device="cpu"),
        list(caches),
        own,
        torch.full((rows,), step - 1, dtype=torch.int32, device="cpu"),
        own,
    )
    for number, cache in enumerate((caches.self_keys, caches.self_values)):
        self_cache[number, -1] = cache[0, :, :, -1, :size_per_head].flatten(1)
    return output[:, None], self_cache, mem_cache


@torch.no_grad()
def decoding(
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
    num_layer: int,
    memory_hidden_dim: int,
    vocab_size: int,
    start_id: int,
    end_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the whole loop: embedding, layers, vocabulary, beam search.

    Parameters
    ----------
    memory_tensor : Tensor
        [batch_size * beam_width, S, memory_hidden_dim] float32, each memory once for each beam.
        Where the beams of a request have the same one, keys and values are computed once.
    memory_sequence_length : Tensor
        [batch_size * beam_width] integers, 0 to S.
    weights : sequence of sequence of Tensor
        ``num_layer`` lists, each as for ``decoder``.
    embedding_table : Tensor
        [V, D] float32.
    decoding_beta, decoding_gamma : Tensor
        [D]: of the last norm.
    embedding_kernel, embedding_bias : Tensor
        [D, V], [V]: the projection to the vocabulary.
    batch_size, beam_width, max_seq_len, head_num, size_per_head, num_layer, memory_hidden_dim,
    vocab_size, start_id, end_id : int
        Sizes, of which the tensors must be, and tokens.

    Returns
    -------
    tuple of Tensor
        output_ids and parent_ids, [max_seq_len, batch_size * beam_width] int32, padded with end_id
        and with each row itself; parents are rows. sequence_length [batch_size * beam_width] int32,
        the end token counted.

    Raises
    ------
    ValueError, TypeError
        Names the argument, what came and what was expected; or logits are NaN.
    """
    op = "decoding"
    (
        batch_size, beam_width, max_seq_len, head_num, size_per_head, num_layer, memory_hidden_dim,
        vocab_size,
    ) = _sizes(
        op, batch_size=batch_size, beam_width=beam_width, max_seq_len=max_seq_len,
        head_num=head_num, size_per_head=size_per_head, num_layer=num_layer,
        memory_hidden_dim=memory_hidden_dim, vocab_size=vocab_size,
    )  # fmt: skip
    start_id = check_int(op, "start_id", start_id, 0, vocab_size - 1)
    end_id = check_int(op, "end_id", end_id, 0, vocab_size - 1)
    size, rows = head_num * size_per_head, batch_size * beam_width
    memory = _floats(op, "memory_tensor", memory_tensor, (rows, None, memory_hidden_dim))
    lengths = _lengths(op, memory_sequence_length, rows, memory.shape[1])
    if not isinstance(weights, Sequence):
        raise type_error(op, "weights", weights, "a sequence")
    if len(weights) != num_layer:
        raise ValueError(
            f"{op}: weights has {len(weights)} layers; expected num_layer, {num_layer}"
        )
    layers = [_layer(op, layer, size, memory_hidden_dim) for layer in weights]
    config = _config(layers, head_num, size_per_head, memory_hidden_dim, vocab_size)
    model = DecoderWeights(
        embedding=_floats(op, "embedding_table", embedding_table, (vocab_size, size)),
        positions=_positions(max_seq_len, size),
        relative_bias=None,
        embedding_norm_gamma=None,
        embedding_norm_beta=None,
        final_norm_gamma=_floats(op, "decoding_gamma", decoding_gamma, (size,)),
        final_norm_beta=_floats(op, "decoding_beta", decoding_beta, (size,)),
        logits=_floats(op, "embedding_kernel", embedding_kernel, (size, vocab_size)).T,
        logits_bias=_floats(op, "embedding_bias", embedding_bias, (vocab_size,)),
        layers=tuple(layers),
    )
    packed = PackedDecoder(config, model)
    by_beam = memory.view(batch_size, beam_width, *memory.shape[1:])
    beam_lengths = lengths.view(batch_size, beam_width)
    if torch.equal(by_beam, by_beam[:, :1].expand_as(by_beam)) and torch.equal(
        beam_lengths, beam_lengths[:, :1].expand_as(beam_lengths)
    ):
        memory, lengths = by_beam[:, 0], beam_lengths[:, 0]
    caches = list(new_caches(config, len(memory), rows, max_seq_len, memory.shape[1]))
    requests = torch.arange(len(memory), device="cpu")
    ops.decoding_read_memory_(
        packed.memory, caches, memory.contiguous(), lengths.contiguous(), requests
    )
    output_ids, parent_ids, sequence_length = ops.faster_transformer_decoding_(
        *packed.of_model, caches, [beam_width, max_seq_len, start_id, end_id]
    )
    return output_ids, parent_ids, sequence_length
