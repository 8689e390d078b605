"""Wrong calls of the attention ops: each error names the argument, what came, what was expected."""

import pytest
import torch

import lmdecode
from tests.support.op_contract import WrongCall, assert_op_refuses, wrong_calls

Q, K, V = torch.zeros(2, 4, 5, 16), torch.zeros(2, 2, 7, 16), torch.zeros(2, 2, 7, 24)
RAGGED = {"q": torch.zeros(5, 4, 16), "k": torch.zeros(7, 2, 16), "v": torch.zeros(7, 2, 24)}
ENDS_Q, ENDS_KV = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7])
CU = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_kv": ENDS_KV}

# For both ops.
COMMON = [
    (r"q is of type list", [1.0]),
    (r"k is of type NoneType", None),
    (r"v is of type NoneType; expected a tensor", None),
    (r"q requires a gradient, and there is none; call it under torch.no_grad",
     Q.clone().requires_grad_()),
    (r"sinks requires a gradient", torch.zeros(4, requires_grad=True)),
    (r"q has dtype float64", Q.double()),
    (r"q has dtype int64", Q.long()),
    (r"k has dtype float16; expected float32", K.half()),
    (r"v has dtype bfloat16", V.bfloat16()),
    (r"v is on meta", V.to("meta")),
    (r"q has shape \[5, 16\]; expected 4 dimensions", Q[0, 0]),
    (r"k has shape \[2, 7, 16\]", K[0]),
    (r"k has shape \[1, 2, 7, 16\]; expected \[2,", K[:1]),
    (r"k has shape \[2, 2, 7, 8\]", K[..., :8]),
    (r"v has shape \[2, 2, 6, 24\]", V[:, :, :6]),
    (r"v has shape \[2, 1, 7, 24\]", V[:, :1]),
    (r"v has shape \[2, 2, 7, 0\]", V[..., :0]),
    (r"head_size of 1 to", {"q": Q[..., :0], "k": K[..., :0]}),
    (r"k has .* 2 heads; expected a divisor of the 3 heads", {"q": Q[:, :3]}),
    (r"0 heads; expected a divisor", {"k": K[:, :0], "v": V[:, :0]}),
    (r"q has shape \[2, 4, 5, 1025\]; expected a head_size of 1 to 1024",
     {"q": torch.zeros(2, 4, 5, 1025), "k": torch.zeros(2, 2, 7, 1025)}),
    (r"window is 0; expected an int of 64 bits, at least 1", 0),
    (r"window is -1", -1),
    (r"window is of type float", 4.0),
    (r"window is of type bool", True),
    (r"window is 18446744073709551616", 2**64),
    (r"window_right is -1", -1),
    (r"window_right is of type str", "0"),
    (r"scale is nan; expected a finite", float("nan")),
    (r"scale is 1e\+300", 1e300),
    (r"scale is of type Tensor", torch.tensor(1.0)),
    (r"softcap is 0; expected more than 0", 0),
    (r"softcap is -1.0", -1.0),
    (r"softcap is 1e-50; expected a float32", 1e-50),
    (r"softcap is inf", float("inf")),
    (r"sinks is of type list", [0.0] * 4),
    (r"sinks has dtype int64", torch.zeros(4).long()),
    (r"sinks has shape \[2\]; expected \[4\]", Q[0, 0, :2, 0]),
    (r"sinks is on meta", torch.zeros(4, device="meta")),
    (r"alibi_slopes has shape \[3, 4\]; expected \[2, 4\]", torch.zeros(3, 4)),
    (r"alibi_slopes has dtype bool", Q[0, :, 0, 0] > 0),
    (r"q_positions has dtype float32", torch.zeros(5)),
    (r"q_positions has shape \[4\]; expected \[5\] or \[2, 5\]", torch.zeros(4).long()),
    (r"q_positions has shape \[2, 4\]; expected \[2, 5\]", torch.zeros(2, 4).long()),
    (r"q_positions is of type list", [0, 1]),
    (r"q_positions of sequence 0 has 4611686018427387904", torch.full((5,), 2**62)),
    (r"kv_lengths\[1\] is 8; expected 0 to 7", torch.tensor([7, 8])),
    (r"kv_lengths\[0\] is -1", torch.tensor([-1, 3])),
    (r"kv_lengths has shape \[3\]", torch.tensor([1, 2, 3])),
    (r"kv_lengths has dtype int16", torch.ones(2).short()),
    (r"key_padding_mask has dtype int64", K[:, 0, :, 0].long()),
    (r"key_padding_mask has shape \[2, 5\]; expected \[2, 7\]", torch.ones(2, 5) > 0),
    (r"key_padding_mask is of type list", [True]),
]  # fmt: skip

ROWS = torch.zeros(2, 7, dtype=torch.int32)  # K has two rows of 7 keys
BLOCKS = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)  # or two blocks of 7

# Of the tables.
TABLES = [
    (r"block_table is of type list; expected a tensor", [[0]]),
    (r"indirection is of type list", [[0]]),
    (r"block_table has dtype int64; expected int32", BLOCKS.long()),
    (r"indirection has dtype int64; expected int32", ROWS.long()),
    (r"block_table has shape \[1, 2\]; expected \[2, entries\]", BLOCKS[:1]),
    (r"block_table has shape \[2\]", BLOCKS[0]),
    (r"block_table has shape .* side by side", BLOCKS.mT),
    (r"block_table is on meta", BLOCKS.to("meta")),
    (
        r"block_table\[1, 1\] is -1; expected 0 to 1 for keys 7 to 9",
        {
            "block_table": torch.tensor([[0, -1], [1, -1]], dtype=torch.int32),
            "kv_lengths": torch.tensor([7, 10]),
        },
    ),
    (r"block_table\[0, 1\] is 2; expected 0 to 1",
     torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)),
    (r"block_table\[0, 0\] is 0; expected 0 to -1",
     {"block_table": BLOCKS, "k": K[:0], "v": V[:0]}),
    (r"k has shape \[2, 2, 0, 16\]; expected blocks of at least 1 token",
     {"block_table": BLOCKS, "k": K[:, :, :0], "v": V[:, :, :0]}),
    (r"kv_lengths\[1\] is 15; expected 0 to 14",
     {"block_table": BLOCKS, "kv_lengths": torch.tensor([14, 15])}),
    (r"key_padding_mask has shape \[2, 7\]; expected \[2, 14\]",
     {"block_table": BLOCKS, "key_padding_mask": torch.ones(2, 7).bool()}),
    (r"v has shape \[1, 2, 7, 24\]; expected \[2, 2, 7, value_size\]",
     {"block_table": BLOCKS, "v": V[:1]}),
    (r"k has shape \[2, 7, 16\]; expected 4 dimensions, \[num_blocks, kv_heads, block_size",
     {"block_table": BLOCKS, "k": K[0]}),
    (r"indirection was given with block_table; expected one of them",
     {"block_table": BLOCKS, "indirection": ROWS}),
    (r"indirection has shape \[2, 6\]; expected at least 7 entries", ROWS[:, :6]),
    (r"indirection\[0, 5\] is 2; expected 0 to 1 for keys 5 to 5",
     torch.tensor([[0, 0, 0, 0, 0, 2, 0], [0] * 7], dtype=torch.int32)),
    (r"indirection\[1, 0\] is -5", torch.tensor([[0] * 7, [-5] * 7], dtype=torch.int32)),
]  # fmt: skip

MASK = torch.zeros(5, 7) > 0
ATTENTION = [
    (r"attn_mask was given with window;", {"attn_mask": MASK, "window": 3}),
    (r"attn_mask was given with window_right", {"attn_mask": MASK, "window_right": None}),
    (r"attn_mask has shape \[1, 1, 5, 6\]; expected one that broadcasts to \[2, 4, 5, 7\]",
     MASK[:, :6]),
    (r"attn_mask has shape \[1, 2, 5, 7\]", MASK.expand(2, 5, 7)),
    (r"attn_mask has shape \[7\]; expected 2 to 4", MASK[0]),
    ("attn_mask has dtype int64; expected one of bool, float32, float16, bfloat16", MASK.long()),
    (r"attn_mask has dtype float64", MASK.double()),
    (r"attn_mask is of type list", [[0]]),
    (r"mask_convention is 'torch'; expected 'masked' or 'visible'",
     {"attn_mask": MASK, "mask_convention": "torch"}),
    (r"q has shape .* expected 3 dimensions", {**CU}),
    (r"cu_seqlens_kv was given without cu_seqlens_q", {**RAGGED, "cu_seqlens_kv": ENDS_KV}),
    (r"cu_seqlens_kv goes from 0 to 5; expected 0 to 7", {**RAGGED, "cu_seqlens_q": ENDS_Q}),
    (r"cu_seqlens_q\[2\] is 5 after 6", {**RAGGED, **CU, "cu_seqlens_q": torch.tensor([0, 6, 5])}),
    (r"cu_seqlens_kv goes from 1 to 7", {**RAGGED, **CU, "cu_seqlens_kv": torch.tensor([1, 3, 7])}),
    (r"cu_seqlens_q has shape \[0\]", {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q[:0]}),
    (r"cu_seqlens_q has shape \[1\], of no sequence; expected one that ends at 5",
     {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q[:1]}),
    (r"cu_seqlens_kv has shape \[2\]; expected \[3\]",
     {**RAGGED, **CU, "cu_seqlens_kv": torch.tensor([0, 7])}),
    (r"cu_seqlens_q has dtype float32", {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q.float()}),
    (r"kv_lengths was given with cu_seqlens_kv",
     {**RAGGED, **CU, "kv_lengths": torch.tensor([1, 2])}),
    (r"attn_mask was given with cu_seqlens_q", {**RAGGED, **CU, "attn_mask": MASK}),
    (r"key_padding_mask was given with cu_seqlens_q",
     {**RAGGED, **CU, "key_padding_mask": torch.ones(2, 7) > 0}),
    (r"q_positions has shape \[4\]; expected \[5\]",
     {**RAGGED, **CU, "q_positions": torch.arange(4)}),
    (r"k has shape \[7, 2, 8\]", {**RAGGED, **CU, "k": torch.zeros(7, 2, 8)}),
    (r"cu_seqlens_kv was given with block_table; expected kv_lengths",
     {"q": RAGGED["q"], **CU, "block_table": BLOCKS}),
    (r"v has shape \[6, 2, 24\]", {**RAGGED, **CU, "v": torch.zeros(6, 2, 24)}),
]  # fmt: skip


@wrong_calls(COMMON, TABLES, ATTENTION)
def test_attention(wrong: WrongCall) -> None:
    assert_op_refuses(lmdecode.sliding_window_attention, wrong, q=Q, k=K, v=V)


@wrong_calls(COMMON, TABLES)
def test_decode(wrong: WrongCall) -> None:
    assert_op_refuses(lmdecode.sliding_window_decode, wrong, q=Q, k=K, v=V)


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
