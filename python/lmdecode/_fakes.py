"""Shape-only implementations of every op, for torch.compile and export; ``_ops`` registers them.

What a fake checks is the same for all ops and follows from their schemas: all tensors of a call
are on one device. What it returns is a function of this file, entered by the op's name, where the
op returns something. It gets the op's arguments by the names of the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["register_fakes"]

#: What an op and its overloads return.
_OUTPUTS: dict[str, Callable[..., Any]] = {}

# What users call, where it is not the op.
_NAMES = {
    "sampler_copy_": "Sampler.load_state_dict",
    "sampler_step_": "Sampler.sample",
    "sampler_verify_": "verify_draft",
}

# The tensor, or list, whose device the others are to have, where it is not the first that is an
# argument of its own.
_DEVICE_OF = {
    "beam_finalize": "state",
    "beam_search_step_": "state",
    "beam_step": "state",
    "causal_forward_": "workspace",
}


def _returns(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function as what these ops return."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        _OUTPUTS.update(dict.fromkeys(ops, function))
        return function

    return enter


def register_fakes() -> None:
    """Register a fake for every op of ``torch.ops.lmdecode`` and every overload of one."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("lmdecode::"):
            base, _, overload = name.partition(".")
            schema = torch._C._get_schema(base, overload)
            torch.library.register_fake(name, _fake(base.removeprefix("lmdecode::"), schema))


def _fake(op: str, schema: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    outputs = _OUTPUTS[op] if schema.returns else None

    def fake(*positional: Any, **keywords: Any) -> Any:
        values = {**defaults, **dict(zip(names, positional, strict=False)), **keywords}
        arguments = {name: values[name] for name in names}
        _check_devices(op, arguments)
        return outputs(**arguments) if outputs is not None else None

    return fake


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each tensor for errors, and the tensor."""
    for name, value in arguments.items():
        # A tensor of a number for each row is named as the number that it is given instead of.
        number = name.removesuffix("_rows")
        if isinstance(value, torch.Tensor):
            yield number if number in arguments else name, value
        elif isinstance(value, (list, tuple)):
            for index, entry in enumerate(value):
                if isinstance(entry, torch.Tensor):
                    yield f"{name}[{index}]", entry


def _check_devices(op: str, arguments: dict[str, Any]) -> None:
    """CPU tensors with a meta tensor beside them end up in a fake, and not in the CPU op."""
    tensors = dict(_tensors(arguments))
    if not tensors:
        return
    like = _DEVICE_OF.get(op) or next((n for n in tensors if "[" not in n), next(iter(tensors)))
    device = tensors[like if like in tensors else f"{like}[0]"].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"{_NAMES.get(op, op)}: {name} is on {tensor.device}; "
                f"expected the device of {like}, {device}"
            )


def _empty(like: torch.Tensor, *shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype)


# --- Numbers alone --------------------------------------------------------------------------------


def _of_numbers(op: str) -> Callable[..., Any]:
    """Return the op itself: without tensors it has nothing to fake."""

    def call(**arguments: Any) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return getattr(torch.ops.lmdecode, op)(*arguments.values())

    return call


for _op in (
    "cpu_capabilities", "cpu_capability", "gguf_type", "sampler_layout", "sampler_row_bytes",
):  # fmt: skip
    _OUTPUTS[_op] = _of_numbers(_op)


# --- Sampling -------------------------------------------------------------------------------------


@_returns("top_k_top_p_sample")
def _sample(logits, return_logits, return_logprob, **_):
    batch = logits.shape[0]
    return (
        _empty(logits, batch, dtype=torch.int64),
        _empty(logits, *logits.shape, dtype=torch.float32) if return_logits else None,
        _empty(logits, batch, dtype=torch.float32) if return_logprob else None,
        _empty(logits, batch, dtype=torch.int32),
        _empty(logits, batch, dtype=torch.uint8),
    )


@_returns("prompt_lookup")
def _prompt_lookup(tokens, num_tokens, **_):
    return _empty(tokens, tokens.shape[0], num_tokens)


# --- Beams ----------------------------------------------------------------------------------------


@_returns("log_softmax_top_k")
def _log_softmax_top_k(logits, num_candidates, num_beams, row_offsets, **_):
    requests = logits.shape[0] // num_beams if row_offsets is None else row_offsets.shape[0] - 1
    return (
        _empty(logits, requests, num_candidates, dtype=torch.float32),
        _empty(logits, requests, num_candidates, dtype=torch.int64),
        _empty(logits, requests, num_candidates, dtype=torch.int64),
        _empty(logits, requests, dtype=torch.uint8),
        _empty(logits, requests, num_candidates, dtype=torch.float32),
    )


@_returns("trie_build")
def _trie_build(tokens, **_):
    nodes = torch.library.get_ctx().new_dynamic_size(min=1)
    return (
        _empty(tokens, nodes, dtype=torch.int32),
        _empty(tokens, nodes + 1, dtype=torch.int32),
        _empty(tokens, nodes, dtype=torch.uint8),
    )


@_returns("trie_step")
def _trie_step(nodes, **_):
    return _empty(nodes, *nodes.shape)


@_returns("beam_step")
def _beam_step(state, scores, row_offsets, rows, **_):
    if row_offsets is None:
        rows = scores.shape[0] * state[0].shape[1]
    elif isinstance(rows, int) and rows < 0:  # in the tensor
        rows = torch.library.get_ctx().new_dynamic_size()
    return (
        _empty(scores, rows, dtype=torch.float32),
        _empty(scores, rows, dtype=torch.int64),
        _empty(scores, rows, dtype=torch.int64),
        _empty(scores, *scores.shape, dtype=torch.int32),
    )


@_returns("beam_search_step_")
def _beam_search_step(state, searches, next_rows, **_):
    return (
        _empty(state[0], next_rows, dtype=torch.int64),
        _empty(state[0], next_rows, dtype=torch.int64),
        _empty(state[0], searches.shape[0], dtype=torch.int64),
    )


@_returns("beam_finalize")
def _beam_finalize(state, num_return_sequences, num_groups, slots, **_):
    first = state[0]
    entries = first.shape[0] if slots is None else slots.shape[0]
    shape = (entries // num_groups, num_return_sequences)
    return (
        _empty(first, *shape, first.shape[2], dtype=torch.int64),
        _empty(first, *shape, dtype=torch.int64),
        _empty(first, *shape, dtype=torch.float64),
        _empty(first, *shape, state[1].shape[2], dtype=torch.float32),
        _empty(first, *shape, state[2].shape[2], dtype=torch.int32),
        _empty(first, *shape, dtype=torch.int64),
    )


# --- Attention ------------------------------------------------------------------------------------


@_returns("sliding_window_attention", "sliding_window_decode")
def _attention(q, v, return_lse, cu_seqlens_q=None, **_):
    lse_shape = q.shape[:-1] if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    return (
        _empty(q, *q.shape[:-1], v.shape[-1]),
        _empty(q, *lse_shape, dtype=torch.float32) if return_lse else None,
    )


@_returns("merge_attention_states")
def _merge_attention_states(o1, lse1, **_):
    return _empty(o1, *o1.shape), _empty(o1, *lse1.shape, dtype=torch.float32)


# --- Linear ---------------------------------------------------------------------------------------

# Formats with groups, by their numbers: elements of a step, and its bytes of one output; see
# csrc/linear/grouped_format.h.
_STEPS = {
    3: (32, 18), 4: (32, 19), 5: (64, 35), 6: (128, 67), 8: (32, 20), 9: (64, 36), 10: (128, 68),
    11: (32, 34), 12: (32, 36), 13: (32, 18), 14: (32, 18), 15: (256, 148), 16: (256, 276),
    17: (256, 274), 18: (256, 164), 19: (256, 146), 20: (256, 138),
    21: (32, 20), 22: (64, 36), 23: (128, 68),
}  # fmt: skip
_BYTES_OF_FOUR = {0: 16, 1: 8, 2: 4, 7: 4}
_INT8_ROWS = (2, 7)
# GGUF's types: the format, and the bytes of a block; see csrc/linear/gguf_blocks.h.
_GGUF_BLOCKS = {
    2: (3, 18), 3: (8, 20), 6: (11, 22), 7: (12, 24), 8: (11, 34), 10: (18, 84), 11: (19, 110),
    12: (15, 144), 13: (16, 176), 14: (17, 210), 20: (13, 18), 23: (20, 136), 39: (14, 17),
}  # fmt: skip


def _packed_bytes(out_features, in_features, format):
    # csrc/linear/packed_layout.h
    unit, unit_bytes = _STEPS[format] if format in _STEPS else (4, _BYTES_OF_FOUR[format])
    outputs = out_features + (-out_features % 64)
    size = 64 + outputs * ((in_features + unit - 1) // unit) * unit_bytes
    return size + (8 * outputs if format in _INT8_ROWS else 0)


def _gguf_features(blocks, type):
    format, block_bytes = _GGUF_BLOCKS[type]
    return format, blocks.shape[1] // block_bytes * _STEPS[format][0]


@_returns("pack_linear")
def _pack_linear(weight, format):
    return _empty(weight, _packed_bytes(*weight.shape, format), dtype=torch.uint8)


@_returns("pack_gguf_linear")
def _pack_gguf_linear(blocks, type):
    format, in_features = _gguf_features(blocks, type)
    return _empty(blocks, _packed_bytes(blocks.shape[0], in_features, format))


@_returns("dequantize_gguf")
def _dequantize_gguf(blocks, type):
    return _empty(blocks, blocks.shape[0], _gguf_features(blocks, type)[1], dtype=torch.float32)


@_returns("repack_linear")
def _repack_linear(packed):
    return torch.empty_like(packed)


@_returns("unpack_linear")
def _unpack_linear(packed, out_features, in_features, **_):
    return _empty(packed, out_features, in_features, dtype=torch.float32)


@_returns("batched_matmul")
def _batched_matmul(a, b, **_):
    return _empty(a, *a.shape[:2], b.shape[2])


@_returns("pack_quantized_linear")
def _pack_quantized_linear(weight, scales, zeros):
    outputs, groups = weight.shape[0] + (-weight.shape[0] % 64), scales.shape[1]
    beside = 2 if zeros is None and weight.shape[1] == 32 * groups else 3  # scales and zeros
    size = 64 + outputs * (weight.shape[1] // 2 + beside * groups)
    return _empty(weight, size, dtype=torch.uint8)


@_returns("packed_linear", "packed_linear_rows")
def _packed_linear(x, out_features, **_):
    return _empty(x, *x.shape[:-1], out_features)


@_returns("layer_norm", "rms_norm")
def _norm(x, **_):
    return _empty(x, *x.shape)


# --- Whole models ---------------------------------------------------------------------------------


@_returns("causal_steps_", "causal_workspace_bytes", "decoding_steps_", "decoding_workspace_bytes")
def _integer(weights, **_):
    return _empty(weights, dtype=torch.int64)


@_returns("faster_transformer_decoding_")
def _faster_transformer_decoding(caches, options, **_):
    rows = caches[0].shape[1]
    ids = _empty(caches[0], options[1], rows, dtype=torch.int32)
    return ids, torch.empty_like(ids), _empty(ids, rows)


@_returns("decoder_layer")
def _decoder_layer(x, **_):
    return torch.empty_like(x)


@_returns("gather_tree")
def _gather_tree(step_ids, **_):
    return torch.empty_like(step_ids)


@_returns("dynamic_time_warping")
def _dynamic_time_warping(cost, **_):
    return _empty(cost, cost.shape[0], dtype=torch.int64)


@_returns("encoder_forward")
def _encoder_forward(embedding, inputs, positions, **_):
    size = (embedding if inputs is None else inputs).shape[1]
    return _empty(positions, positions.shape[0], size, dtype=torch.float32)


@_returns("causal_forward_")
def _causal_forward(workspace, num_logits, vocab_size, **_):
    return _empty(workspace, num_logits, vocab_size, dtype=torch.float32)
