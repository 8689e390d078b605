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
    (r"q requires a gradient, and there is none; call it under torch.no_grad",
     Q.clone().requires_grad_()),
    (r"sinks requires a gradient", torch.zeros(4, requires_grad=True)),
    (r"v has shape \[2, 2, 7, 0\]", V[..., :0]),
    (r"head_size of 1 to", {"q": Q[..., :0], "k": K[..., :0]}),
    (r"0 heads; expected a divisor", {"k": K[:, :0], "v": V[:, :0]}),
    (r"q has shape \[2, 4, 5, 1025\]; expected a head_size of 1 to 1024",
     {"q": torch.zeros(2, 4, 5, 1025), "k": torch.zeros(2, 2, 7, 1025)}),
    (r"window is 0; expected an int of 64 bits, at least 1", 0),
    (r"window is -1", -1),
    (r"window_right is -1", -1),
    (r"scale is 1e\+300", 1e300),
    (r"softcap is 0; expected more than 0", 0),
    (r"softcap is -1.0", -1.0),
    (r"softcap is 1e-50; expected a float32", 1e-50),
    (r"softcap is inf", float("inf")),
    (r"q_positions of sequence 0 has 4611686018427387904", torch.full((5,), 2**62)),
]  # fmt: skip

ROWS = torch.zeros(2, 7, dtype=torch.int32)  # K has two rows of 7 keys
BLOCKS = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)  # or two blocks of 7

# Of the tables.
TABLES = [
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
    (r"indirection was given with block_table; expected one of them",
     {"block_table": BLOCKS, "indirection": ROWS}),
    (r"indirection has shape \[2, 6\]; expected at least 7 entries", ROWS[:, :6]),
    (r"indirection\[0, 5\] is 2; expected 0 to 1 for keys 5 to 5",
     torch.tensor([[0, 0, 0, 0, 0, 2, 0], [0] * 7], dtype=torch.int32)),
    (r"indirection\[1, 0\] is -5", torch.tensor([[0] * 7, [-5] * 7], dtype=torch.int32)),
]  # fmt: skip

MASK = torch.zeros(5, 7) > 0
ATTENTION = [
    (r"attn_mask has shape \[1, 1, 5, 6\]; expected one that broadcasts to \[2, 4, 5, 7\]",
     MASK[:, :6]),
    (r"attn_mask has shape \[1, 2, 5, 7\]", MASK.expand(2, 5, 7)),
    (r"mask_convention is 'torch'; expected 'masked' or 'visible'",
     {"attn_mask": MASK, "mask_convention": "torch"}),
    (r"cu_seqlens_kv was given without cu_seqlens_q", {**RAGGED, "cu_seqlens_kv": ENDS_KV}),
    (r"cu_seqlens_kv goes from 0 to 5; expected 0 to 7", {**RAGGED, "cu_seqlens_q": ENDS_Q}),
    (r"cu_seqlens_q\[2\] is 5 after 6", {**RAGGED, **CU, "cu_seqlens_q": torch.tensor([0, 6, 5])}),
    (r"cu_seqlens_kv goes from 1 to 7", {**RAGGED, **CU, "cu_seqlens_kv": torch.tensor([1, 3, 7])}),
    (r"cu_seqlens_q has shape \[0\]", {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q[:0]}),
    (r"cu_seqlens_q has shape \[1\], of no sequence; expected one that ends at 5",
     {**RAGGED, **CU, "cu_seqlens_q": ENDS_Q[:1]}),
    (r"cu_seqlens_kv has shape \[2\]; expected \[3\]",
     {**RAGGED, **CU, "cu_seqlens_kv": torch.tensor([0, 7])}),
    (r"kv_lengths was given with cu_seqlens_kv",
     {**RAGGED, **CU, "kv_lengths": torch.tensor([1, 2])}),
    (r"attn_mask was given with cu_seqlens_q", {**RAGGED, **CU, "attn_mask": MASK}),
    (r"key_padding_mask was given with cu_seqlens_q",
     {**RAGGED, **CU, "key_padding_mask": torch.ones(2, 7) > 0}),
    (r"cu_seqlens_kv was given with block_table; expected kv_lengths",
     {"q": RAGGED["q"], **CU, "block_table": BLOCKS}),
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
