"""Wrong calls of the attention ops: each error names the argument, what came, what was expected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmdecode

Q, K, V = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 7, 16), torch.zeros(2, 2, 7, 24)
RAGGED = {"q": torch.zeros(5, 4, 16), "k": torch.zeros(7, 2, 16), "v": torch.zeros(7, 2, 24)}
ENDS_Q, ENDS_KV = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7])
CU = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_kv": ENDS_KV}

Wrong = dict[str, tuple[str, type[Exception], dict[str, Any]]]

# For both ops.
COMMON: Wrong = {
    "q: a list": (r"q is of type list", TypeError, {"q": [1.0]}),
    "k: None": (r"k is of type NoneType", TypeError, {"k": None}),
    "v: None": (r"v is of type NoneType; expected a tensor", TypeError, {"v": None}),
    "q: gradient": (
        r"q requires a gradient, and there is none; call it under torch.no_grad",
        ValueError,
        {"q": Q.clone().requires_grad_()},
    ),
    "sinks: gradient": (
        r"sinks requires a gradient",
        ValueError,
        {"sinks": torch.zeros(4, requires_grad=True)},
    ),
    "q: float64": (r"q has dtype float64", ValueError, {"q": Q.double()}),
    "q: int": (r"q has dtype int64", ValueError, {"q": Q.long()}),
    "k: another dtype": (r"k has dtype float16; expected float32", ValueError, {"k": K.half()}),
    "v: another dtype": (r"v has dtype bfloat16", ValueError, {"v": V.bfloat16()}),
    "v: another device": (r"v is on meta", ValueError, {"v": V.to("meta")}),
    "q: a matrix": (r"q has shape \[5, 16\]; expected 4 dimensions", ValueError, {"q": Q[0, 0]}),
    "k: three dimensions": (r"k has shape \[2, 7, 16\]", ValueError, {"k": K[0]}),
    "k: another batch": (r"k has shape \[1, 2, 7, 16\]; expected \[2,", ValueError, {"k": K[:1]}),
    "k: another head size": (r"k has shape \[2, 2, 7, 8\]", ValueError, {"k": K[..., :8]}),
    "v: other tokens": (r"v has shape \[2, 2, 6, 24\]", ValueError, {"v": V[:, :, :6]}),
    "v: other heads": (r"v has shape \[2, 1, 7, 24\]", ValueError, {"v": V[:, :1]}),
    "v: no elements": (r"v has shape \[2, 2, 7, 0\]", ValueError, {"v": V[..., :0]}),
    "q: no elements": (r"head_size of 1 to", ValueError, {"q": Q[..., :0], "k": K[..., :0]}),
    "heads": (r"k has .* 2 heads; expected a divisor of the 3 heads", ValueError, {"q": Q[:, :3]}),
    "no heads": (r"0 heads; expected a divisor", ValueError, {"k": K[:, :0], "v": V[:, :0]}),
    "a large head": (
        r"q has shape \[2, 4, 5, 1025\]; expected a head_size of 1 to 1024",
        ValueError,
        {"q": torch.zeros(2, 4, 5, 1025), "k": torch.zeros(2, 2, 7, 1025)},
    ),
    "window: 0": (
        r"window is 0; expected an int of 64 bits, at least 1",
        ValueError,
        {"window": 0},
    ),
    "window: -1": (r"window is -1", ValueError, {"window": -1}),
    "window: float": (r"window is of type float", TypeError, {"window": 4.0}),
    "window: bool": (r"window is of type bool", TypeError, {"window": True}),
    "window: 65 bits": (r"window is 18446744073709551616", ValueError, {"window": 2**64}),
    "window_right: -1": (r"window_right is -1", ValueError, {"window_right": -1}),
    "window_right: str": (r"window_right is of type str", TypeError, {"window_right": "0"}),
    "scale: nan": (r"scale is nan; expected a finite", ValueError, {"scale": float("nan")}),
    "scale: too large": (r"scale is 1e\+300", ValueError, {"scale": 1e300}),
    "scale: a tensor": (r"scale is of type Tensor", TypeError, {"scale": torch.tensor(1.0)}),
    "softcap: 0": (r"softcap is 0; expected more than 0", ValueError, {"softcap": 0}),
    "softcap: -1": (r"softcap is -1.0", ValueError, {"softcap": -1.0}),
    "softcap: 0 in float32": (
        r"softcap is 1e-50; expected a float32",
        ValueError,
        {"softcap": 1e-50},
    ),
    "softcap: inf": (r"softcap is inf", ValueError, {"softcap": float("inf")}),
    "sinks: a list": (r"sinks is of type list", TypeError, {"sinks": [0.0] * 4}),
    "sinks: int": (r"sinks has dtype int64", ValueError, {"sinks": torch.zeros(4).long()}),
    "sinks: a shape": (
        r"sinks has shape \[2\]; expected \[4\]",
        ValueError,
        {"sinks": Q[0, 0, :2, 0]},
    ),
    "sinks: meta": (r"sinks is on meta", ValueError, {"sinks": torch.zeros(4, device="meta")}),
    "slopes: a shape": (
        r"alibi_slopes has shape \[3, 4\]; expected \[2, 4\]",
        ValueError,
        {"alibi_slopes": torch.zeros(3, 4)},
    ),
    "slopes: bool": (
        r"alibi_slopes has dtype bool",
        ValueError,
        {"alibi_slopes": Q[0, :, 0, 0] > 0},
    ),
    "positions: float": (
        r"q_positions has dtype float32",
        ValueError,
        {"q_positions": torch.zeros(5)},
    ),
    "positions: a number of them": (
        r"q_positions has shape \[4\]; expected \[5\] or \[2, 5\]",
        ValueError,
        {"q_positions": torch.zeros(4).long()},
    ),
    "positions: a shape": (
        r"q_positions has shape \[2, 4\]; expected \[2, 5\]",
        ValueError,
        {"q_positions": torch.zeros(2, 4).long()},
    ),
    "positions: a list": (r"q_positions is of type list", TypeError, {"q_positions": [0, 1]}),
    "positions: too large": (
        r"q_positions of sequence 0 has 4611686018427387904",
        ValueError,
        {"q_positions": torch.full((5,), 2**62)},
    ),
    "lengths: too long": (
        r"kv_lengths\[1\] is 8; expected 0 to 7",
        ValueError,
        {"kv_lengths": torch.tensor([7, 8])},
    ),
    "lengths: negative": (
        r"kv_lengths\[0\] is -1",
        ValueError,
        {"kv_lengths": torch.tensor([-1, 3])},
    ),
    "lengths: a shape": (
        r"kv_lengths has shape \[3\]",
        ValueError,
        {"kv_lengths": torch.tensor([1, 2, 3])},
    ),
    "lengths: int16": (
        r"kv_lengths has dtype int16",
        ValueError,
        {"kv_lengths": torch.ones(2).short()},
    ),
    "padding: int": (
        r"key_padding_mask has dtype int64",
        ValueError,
        {"key_padding_mask": K[:, 0, :, 0].long()},
    ),
    "padding: a shape": (
        r"key_padding_mask has shape \[2, 5\]; expected \[2, 7\]",
        ValueError,
        {"key_padding_mask": torch.ones(2, 5) > 0},
    ),
    "padding: a list": (
        r"key_padding_mask is of type list",
        TypeError,
        {"key_padding_mask": [True]},
    ),
}

ROWS = torch.zeros(2, 7, dtype=torch.int32)  # K has two rows of 7 keys
BLOCKS = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)  # or two blocks of 7

# Of the tables.
TABLES: Wrong = {
    "block_table: a list": (
        r"block_table is of type list; expected a tensor",
        TypeError,
        {"block_table": [[0]]},
    ),
    "indirection: a list": (r"indirection is of type list", TypeError, {"indirection": [[0]]}),
    "block_table: int64": (
        r"block_table has dtype int64; expected int32",
        ValueError,
        {"block_table": BLOCKS.long()},
    ),
    "indirection: int64": (
        r"indirection has dtype int64; expected int32",
        ValueError,
        {"indirection": ROWS.long()},
    ),
    "block_table: a shape": (
        r"block_table has shape \[1, 2\]; expected \[2, entries\]",
        ValueError,
        {"block_table": BLOCKS[:1]},
    ),
    "block_table: a row": (
        r"block_table has shape \[2\]",
        ValueError,
        {"block_table": BLOCKS[0]},
    ),
    "block_table: strides": (
        r"block_table has shape .* side by side",
        ValueError,
        {"block_table": BLOCKS.mT},
    ),
    "block_table: meta": (
        r"block_table is on meta",
        ValueError,
        {"block_table": BLOCKS.to("meta")},
    ),
    "block_table: -1": (
        r"block_table\[1, 1\] is -1; expected 0 to 1 for keys 7 to 9",
        ValueError,
        {
            "block_table": torch.tensor([[0, -1], [1, -1]], dtype=torch.int32),
            "kv_lengths": torch.tensor([7, 10]),
        },
    ),
    "block_table: too large": (
        r"block_table\[0, 1\] is 2; expected 0 to 1",
        ValueError,
        {"block_table": torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)},
    ),
    "block_table: of no blocks": (
        r"block_table\[0, 0\] is 0; expected 0 to -1",
        ValueError,
        {"block_table": BLOCKS, "k": K[:0], "v": V[:0]},
    ),
    "block_table: empty blocks": (
        r"k has shape \[2, 2, 0, 16\]; expected blocks of at least 1 token",
        ValueError,
        {"block_table": BLOCKS, "k": K[:, :, :0], "v": V[:, :, :0]},
    ),
    "block_table: lengths": (
        r"kv_lengths\[1\] is 15; expected 0 to 14",
        ValueError,
        {"block_table": BLOCKS, "kv_lengths": torch.tensor([14, 15])},
    ),
    "block_table: padding": (
        r"key_padding_mask has shape \[2, 7\]; expected \[2, 14\]",
        ValueError,
        {"block_table": BLOCKS, "key_padding_mask": torch.ones(2, 7).bool()},
    ),
    "block_table: v": (
        r"v has shape \[1, 2, 7, 24\]; expected \[2, 2, 7, value_size\]",
        ValueError,
        {"block_table": BLOCKS, "v": V[:1]},
    ),
    "block_table: k": (
        r"k has shape \[2, 7, 16\]; expected 4 dimensions, \[num_blocks, kv_heads, block_size",
        ValueError,
        {"block_table": BLOCKS, "k": K[0]},
    ),
    "both tables": (
        r"indirection was given with block_table; expected one of them",
        ValueError,
        {"block_table": BLOCKS, "indirection": ROWS},
    ),
    "indirection: too short": (
        r"indirection has shape \[2, 6\]; expected at least 7 entries",
        ValueError,
        {"indirection": ROWS[:, :6]},
    ),
    "indirection: 2": (
        r"indirection\[0, 5\] is 2; expected 0 to 1 for keys 5 to 5",
        ValueError,
        {"indirection": torch.tensor([[0, 0, 0, 0, 0, 2, 0], [0] * 7], dtype=torch.int32)},
    ),
    "indirection: -5": (
        r"indirection\[1, 0\] is -5",
        ValueError,
        {"indirection": torch.tensor([[0] * 7, [-5] * 7], dtype=torch.int32)},
    ),
}

MASK = torch.zeros(5, 7) > 0
ATTENTION: Wrong = {
    "mask with window": (
        r"attn_mask was given with window;",
        ValueError,
        {"attn_mask": MASK, "window": 3},
    ),
    "mask with window_right": (
        r"attn_mask was given with window_right",
        ValueError,
        {"attn_mask": MASK, "window_right": None},
    ),
    "mask: a shape": (
        r"attn_mask has shape \[1, 1, 5, 6\]; expected one that broadcasts to \[2, 4, 5, 7\]",
        ValueError,
        {"attn_mask": MASK[:, :6]},
    ),
    "mask: heads": (
        r"attn_mask has shape \[1, 2, 5, 7\]",
        ValueError,
        {"attn_mask": MASK.expand(2, 5, 7)},
    ),
    "mask: a row": (
        r"attn_mask has shape \[7\]; expected 2 to 4",
        ValueError,
        {"attn_mask": MASK[0]},
    ),
    "mask: int": (
        "attn_mask has dtype int64; expected one of bool, float32, float16, bfloat16",
        ValueError,
        {"attn_mask": MASK.long()},
    ),
    "mask: float64": (r"attn_mask has dtype float64", ValueError, {"attn_mask": MASK.double()}),
    "mask: a list": (r"attn_mask is of type list", TypeError, {"attn_mask": [[0]]}),
    "convention": (
        r"mask_convention is 'torch'; expected 'masked' or 'visible'",
        ValueError,
        {"attn_mask": MASK, "mask_convention": "torch"},
    ),
    "ragged: dense q": (r"q has shape .* expected 3 dimensions", ValueError, {**CU}),
    "ragged: kv alone": (
        r"cu_seqlens_kv was given without cu_seqlens_q",
        ValueError,
        {**RAGGED, "cu_seqlens_kv": ENDS_KV},
    ),
    "ragged: k by q's": (
        r"cu_seqlens_kv goes from 0 to 5; expected 0 to 7",
        ValueError,
        {**RAGGED, "cu_seqlens_q": ENDS_Q},
    ),
    "ragged: descent": (
        r"cu_seqlens_q\[2\] is 5 after 6",
        ValueError,
        {**RAGGED, **CU, "cu_seqlens_q": torch.tensor([0, 6, 5])},
    ),
    "ragged: begins late": (
        r"cu_seqlens_kv goes from 1 to 7",
        ValueError,
        {**RAGGED, **CU, "cu_seqlens_kv": torch.tensor([1, 3, 7])},
    ),
    "ragged: empty": (
        r"cu_seqlens_q has shape \[0\]",
        ValueError,
        {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q[:0]},
    ),
    "ragged: no sequence": (
        r"cu_seqlens_q has shape \[1\], of no sequence; expected one that ends at 5",
        ValueError,
        {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q[:1]},
    ),
    "ragged: other sequences": (
        r"cu_seqlens_kv has shape \[2\]; expected \[3\]",
        ValueError,
        {**RAGGED, **CU, "cu_seqlens_kv": torch.tensor([0, 7])},
    ),
    "ragged: float": (
        r"cu_seqlens_q has dtype float32",
        ValueError,
        {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q.float()},
    ),
    "ragged: lengths": (
        r"kv_lengths was given with cu_seqlens_kv",
        ValueError,
        {**RAGGED, **CU, "kv_lengths": torch.tensor([1, 2])},
    ),
    "ragged: mask": (
        r"attn_mask was given with cu_seqlens_q",
        ValueError,
        {**RAGGED, **CU, "attn_mask": MASK},
    ),
    "ragged: padding": (
        r"key_padding_mask was given with cu_seqlens_q",
        ValueError,
        {**RAGGED, **CU, "key_padding_mask": torch.ones(2, 7) > 0},
    ),
    "ragged: positions": (
        r"q_positions has shape \[4\]; expected \[5\]",
        ValueError,
        {**RAGGED, **CU, "q_positions": torch.arange(4)},
    ),
    "ragged: k": (
        r"k has shape \[7, 2, 8\]",
        ValueError,
        {**RAGGED, **CU, "k": torch.zeros(7, 2, 8)},
    ),
    "ragged: both lengths": (
        r"cu_seqlens_kv was given with block_table; expected kv_lengths",
        ValueError,
        {"q": RAGGED["q"], **CU, "block_table": BLOCKS},
    ),
    "ragged: v": (
        r"v has shape \[6, 2, 24\]",
        ValueError,
        {**RAGGED, **CU, "v": torch.zeros(6, 2, 24)},
    ),
}


def check(op: Callable[..., Any], wrong: tuple[str, type[Exception], dict[str, Any]]) -> None:
    message, error, changes = wrong
    with pytest.raises(error, match=message) as raised:
        op(**{"q": Q, "k": K, "v": V, **changes})
    assert str(raised.value).startswith(f"{op.__name__}: ")


@pytest.mark.parametrize("case", [*COMMON, *TABLES, *ATTENTION])
def test_attention(case: str) -> None:
    check(lmdecode.sliding_window_attention, {**COMMON, **TABLES, **ATTENTION}[case])


@pytest.mark.parametrize("case", [*COMMON, *TABLES])
def test_decode(case: str) -> None:
    check(lmdecode.sliding_window_decode, {**COMMON, **TABLES}[case])


def test_what_the_cases_change_is_right() -> None:
    assert lmdecode.sliding_window_attention(Q, K, V).shape == (2, 4, 5, 24)
    assert lmdecode.sliding_window_decode(Q, K, V).shape == (2, 4, 5, 24)
    assert lmdecode.sliding_window_attention(**RAGGED, **CU).shape == (5, 4, 24)
    assert lmdecode.sliding_window_attention(Q, K, V, attn_mask=MASK).shape == (2, 4, 5, 24)
    for op in (lmdecode.sliding_window_attention, lmdecode.sliding_window_decode):
        for table in ({"block_table": BLOCKS}, {"indirection": ROWS}):
            assert op(Q, K, V, **table).shape == (2, 4, 5, 24)


def test_the_op_itself_refuses_what_the_function_would() -> None:
    """torch.ops.lmdecode is public too."""
    op = torch.ops.lmdecode.sliding_window_decode.default
    nothing = [None] * 7
    for window, right, softcap, message in (
        (0, 0, 0.0, "window is 0; expected at least 1"),
        (-2, 0, 0.0, "window is -2"),
        (1, -2, 0.0, "window_right is -2"),
        (1, 0, -1.0, "softcap is -1"),
        (1, 0, float("nan"), "softcap is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            op(Q, K, V, window, right, 1.0, softcap, *nothing, False)
    with pytest.raises(ValueError, match="cu_seqlens_q was given without cu_seqlens_kv"):
        torch.ops.lmdecode.sliding_window_attention(
            *RAGGED.values(), -1, 0, 1.0, 0.0, *[None] * 4, ENDS_Q, *[None] * 2, False,
            *[None] * 3, False,
        )  # fmt: skip


def test_decoding_with_a_ring_says_what_to_call() -> None:
    ring = lmdecode.RingKVCache(1, 2, 16, 4)
    q = torch.zeros(1, 4, 1, 16)
    for arguments in ((ring,), (ring, ring), (torch.zeros(1, 2, 7, 16), ring)):
        with pytest.raises(TypeError, match=r"is a RingKVCache; .* by ring\.attend\(q\)$"):
            lmdecode.sliding_window_decode(q, *arguments)
    with pytest.raises(TypeError, match="v is of type NoneType; expected a tensor"):
        lmdecode.sliding_window_decode(q, torch.zeros(1, 2, 7, 16))
