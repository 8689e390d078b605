"""A sparse tensor in any argument of a public function: a ValueError that names it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.compat import ascend


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def attention() -> dict[str, Any]:
    return {
        "q": random(2, 4, 3, 8), "k": random(2, 2, 5, 8), "v": random(2, 2, 5, 8),
        "sinks": random(4), "alibi_slopes": random(4), "q_positions": torch.arange(6).view(2, 3),
        "kv_lengths": torch.tensor([5, 3]), "key_padding_mask": torch.ones(2, 5).bool(),
    }  # fmt: skip


def search() -> dict[str, Any]:
    state = lmdecode.new_beam_state(2, 2, 6)
    state.lengths.fill_(2)
    return {"state": state, "parameters": lmdecode.beam_parameters(2, 2, end_tokens=[5])}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "top_k_top_p_sample": (
        lmdecode.top_k_top_p_sample,
        lambda: {
            "logits": random(2, 9), "top_k": torch.tensor([1, 2]), "top_p": random(2).abs(),
            "min_p": random(2).abs(), "temperature": random(2).abs(),
            "seed": torch.tensor([1, 2]), "position": torch.tensor([1, 2]),
        },
    ),
    "top_k_top_p_sample, q": (
        lmdecode.top_k_top_p_sample, lambda: {"logits": random(2, 9), "q": random(2, 9).abs()},
    ),
    "ascend": (
        ascend.top_k_top_p_sample,
        lambda: {
            "logits": random(2, 9), "topK": torch.tensor([1, 2]), "topP": random(2).abs(),
            "q": random(2, 9).abs(),
        },
    ),
    "log_softmax_top_k": (
        lmdecode.log_softmax_top_k,
        lambda: {
            "logits": random(4, 40), "beam_scores": random(4), "num_candidates": 3,
            "num_beams": torch.tensor([1, 3]), "sequences": torch.arange(24).view(4, 6) % 5,
            "lengths": torch.tensor([4, 5]), "repetition_penalty": torch.tensor([1.1, 2.0]),
            "no_repeat_ngram_size": torch.tensor([2, 0]), "end_tokens": torch.tensor([7]),
            "min_lengths": torch.tensor([5, 5]), "suppressed_tokens": torch.tensor([3]),
            "forced_tokens": torch.arange(4) - 3, "diversity_tokens": torch.tensor([[9], [9]]),
            "diversity_penalty": torch.tensor([0.5, 1.0]), "bias": random(40),
            "token_bitmask": torch.full((2, 2), -3, dtype=torch.int32),
        },
    ),
    "log_softmax_top_k, beams in columns": (
        lmdecode.log_softmax_top_k,
        lambda: {
            "logits": random(4, 40), "beam_scores": random(2, 2), "num_candidates": 3,
            "num_beams": 2,
        },
    ),
    "beam_step": (
        lmdecode.beam_step,
        lambda: {
            **search(), "scores": random(2, 4).sort(descending=True).values,
            "tokens": torch.arange(8).view(2, 4), "beams": torch.zeros(2, 4, dtype=torch.int64),
            "log_probs": random(2, 4), "status": torch.zeros(2, dtype=torch.uint8),
            "slots": torch.tensor([0, 1]), "row_offsets": torch.tensor([0, 2, 4]),
            "parent_offsets": torch.tensor([0, 2]), "stopped": torch.zeros(2, 4).bool(),
            "bonus": random(2, 2),
        },
    ),
    "beam_finalize": (
        lmdecode.beam_finalize,
        lambda: {
            **search(), "num_return_sequences": 1, "slots": torch.tensor([0, 1]),
            "sequences": torch.ones(2, 2, 3, dtype=torch.int64), "scores": random(2, 2),
        },
    ),
    "reorder_cache_": (
        lmdecode.reorder_cache_,
        lambda: {"tensors": [random(2, 3), random(2, 4)], "parents": torch.tensor([1, 0])},
    ),
    "update_beam_indirection_": (
        lmdecode.update_beam_indirection_,
        lambda: {
            "indirection": torch.zeros(2, 4, dtype=torch.int32), "parents": torch.tensor([1, 0]),
            "length": torch.tensor([2, 3]),
        },
    ),
    "ring_cache_append_": (
        lmdecode.ring_cache_append_,
        lambda: {
            "keys": random(2, 3, 5, 4), "values": random(2, 3, 5, 4), "k": random(2, 3, 2, 4),
            "v": random(2, 3, 2, 4), "position": torch.tensor([1, 2]),
        },
    ),
    "copy_blocks_": (
        lmdecode.copy_blocks_,
        lambda: {
            "pools": [random(4, 2, 5, 3)], "copies": torch.tensor([[0, 1, 5]], dtype=torch.int32),
        },
    ),
    "sliding_window_attention": (
        lmdecode.sliding_window_attention, lambda: {**attention(), "attn_mask": random(3, 5)},
    ),
    "sliding_window_attention, 4 dimensions of a mask": (
        lmdecode.sliding_window_attention,
        lambda: {**attention(), "attn_mask": random(2, 4, 3, 5)},
    ),
    "sliding_window_attention, ragged": (
        lmdecode.sliding_window_attention,
        lambda: {
            "q": random(6, 4, 8), "k": random(6, 2, 8), "v": random(6, 2, 8),
            "cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_kv": torch.tensor([0, 2, 6]),
        },
    ),
    "sliding_window_decode": (lmdecode.sliding_window_decode, attention),
    "merge_attention_states": (
        lmdecode.merge_attention_states,
        lambda: {
            "o1": random(2, 2, 3, 4), "lse1": random(2, 2, 3), "o2": random(2, 2, 3, 4),
            "lse2": random(2, 2, 3),
        },
    ),
    "PackedLinear": (lmdecode.PackedLinear, lambda: {"weight": random(4, 3), "bias": random(4)}),
    "a PackedLinear": (
        lmdecode.PackedLinear(random(4, 3)),
        lambda: {"x": random(2, 3), "multiplier": random(2, 4), "residual": random(2, 4)},
    ),
    "layer_norm": (
        lmdecode.layer_norm, lambda: {"x": random(2, 3), "weight": random(3), "bias": random(3)},
    ),
    "rms_norm": (lmdecode.rms_norm, lambda: {"x": random(2, 3), "weight": random(3)}),
    "prompt_lookup": (
        lmdecode.prompt_lookup,
        lambda: {
            "tokens": torch.ones(2, 3, dtype=torch.int64), "num_tokens": 2,
            "lengths": torch.tensor([2, 3]),
        },
    ),
    "gather_tree": (
        lmdecode.gather_tree,
        lambda: {
            "step_ids": torch.ones(2, 1, 2, dtype=torch.int32),
            "parent_ids": torch.zeros(2, 1, 2, dtype=torch.int32),
            "max_sequence_lengths": torch.tensor([2], dtype=torch.int32), "end_token": 7,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_sparse_arguments(name: str) -> None:
    function, make_arguments = CALLS[name]
    function(**make_arguments())  # the call is right but for the layout
    for argument, value in make_arguments().items():
        called = argument
        if isinstance(value, torch.Tensor):
            bad: Any = value.to_sparse()
        elif isinstance(value, (list, tuple)):
            called = rf"{argument}(\[0\]|\.sequences)"
            first = value[0].to_sparse()
            bad = [first, *value[1:]] if isinstance(value, list) else type(value)(first, *value[1:])
            if argument == "parameters":
                called = r"parameters(\[0\]|\.num_beams)"
        else:
            continue
        with pytest.raises(ValueError, match=rf"\b{called} has layout torch.sparse_coo"):
            function(**{**make_arguments(), argument: bad})
