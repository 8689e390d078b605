"""AWQ's and GPTQ's tensors against their definitions, written out in plain torch."""

import pytest
import torch

from lmdecode import PackedLinear
from lmdecode.integrations.transformers import packed_from_awq, packed_from_gptq
from tests.support.op_contract import WrongCall, assert_refused, wrong_calls

INPUTS, OUTPUTS = 256, 72


def words_of(values: torch.Tensor) -> torch.Tensor:
    """int32 [..., n / 8] of numbers below 16 [..., n]: the first in the lowest four bits."""
    parts = values.long().unflatten(-1, (-1, 8))
    words = sum(parts[..., i] << 4 * i for i in range(8))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def zero_words(zeros: torch.Tensor, offset: int) -> torch.Tensor:
    """int32 [groups, out / 8] of zeros [groups, out]: of "gptq" (offset 1) or "gptq_v2" (0)."""
    return (words_of(zeros).long() - offset * 0x11111111).int()


def random_layer(group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [in, out], scales and zeros [groups, out]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(16, (INPUTS, OUTPUTS), generator=generator)
    scales = torch.rand(INPUTS // group, OUTPUTS, generator=generator).half() / 64
    return q, scales, torch.randint(16, scales.shape, generator=generator)


def same(layer: PackedLinear, weight: torch.Tensor) -> None:
    x = torch.eye(len(weight)) * 127
    want = (127 * weight.double()).float()
    assert torch.equal(layer(x), want if layer.bias is None else want + layer.bias)


def awq_columns(columns: torch.Tensor) -> torch.Tensor:
    """Of each eight columns, the order in which AWQ puts them into a word."""
    return columns.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_awq(group: int) -> None:
    q, scales, zeros = random_layer(group)
    bias = torch.randn(OUTPUTS)
    layer = packed_from_awq(words_of(awq_columns(q)), words_of(awq_columns(zeros)), scales, bias)
    times = INPUTS // scales.shape[0]
    weight = (q - zeros.repeat_interleave(times, 0)) * scales.float().repeat_interleave(times, 0)
    same(layer, weight)
    assert layer.dtype == "int4" and layer.group_size == min(group, 128)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("order", ["none", "neighbours", "mixed"])
@pytest.mark.parametrize("group", [32, 128])
def test_gptq(group: int, order: str, offset: int) -> None:
    q, scales, zeros = random_layer(group, seed=1)
    g_idx = torch.arange(INPUTS) // group
    if order == "mixed":
        g_idx = g_idx[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(2))]
    layer = packed_from_gptq(
        words_of(q.T).T, zero_words(zeros, offset), scales.float(),
        None if order == "none" else g_idx.int(), zero_offset=offset,
    )  # fmt: skip
    same(layer, (q - zeros[g_idx]) * scales.float()[g_idx])
    assert (layer.input_order is not None) == (order == "mixed")


def test_words_are_those_of_the_formats() -> None:
    """The helpers of this file, on numbers written by hand."""
    assert words_of(torch.arange(8))[0].item() == 0x76543210
    assert words_of(torch.full((8,), 15))[0].item() == -1
    assert words_of(awq_columns(torch.arange(8)))[0].item() == 0x75316420
    zeros = torch.tensor([[0, 0, 8, 15, 1, 0, 7, 3], [8] * 8, [0] * 8])
    assert zero_words(zeros, 0)[:2].flatten().tolist() == [0x3701F800, 0x88888888 - (1 << 32)]
    # The first 0 borrows from the second, which borrows from 8; the one after 1 borrows from 7.
    assert zero_words(zeros, 1).flatten().tolist() == [0x25F0E6EF, 0x77777777, -0x11111111]


Q, S, Z = random_layer(64)
GPTQ = (words_of(Q.T).T, words_of(Z), S)
AWQ = (words_of(awq_columns(Q)), words_of(awq_columns(Z)), S)
WRONG = [
    ("packed_from_awq: qweight is of type list", lambda: packed_from_awq([1], *AWQ[1:])),
    ("qweight has dtype int64; expected int32", lambda: packed_from_awq(AWQ[0].long(), *AWQ[1:])),
    (r"qzeros is of \[4, 64\] groups and outputs; expected \[4, 72\]",
     lambda: packed_from_awq(AWQ[0], AWQ[1][:, :8], S)),
    (r"scales holds numbers that float16 does not hold, 0\.\d+ the first of them; expected",
     lambda: packed_from_awq(*AWQ[:2], S.float() + 1e-9)),
    (r"scales is of \[4, 71\]", lambda: packed_from_gptq(*GPTQ[:2], S[:, :71])),
    (r"scales has shape \[72\]; expected two", lambda: packed_from_gptq(*GPTQ[:2], S[0])),
    (r"g_idx is int64 \[3\]; expected int32 or int64 \[256\]",
     lambda: packed_from_gptq(*GPTQ, torch.arange(3))),
    (
        "does not have 64 inputs of each of 4 groups, but 256 of group 0; expected 64 of each from "
        "0 to 3",
        lambda: packed_from_gptq(*GPTQ, torch.zeros(256).int()),
    ),
    ("does not have 64 inputs of each of 4 groups, but 64 of group 4; expected",
     lambda: packed_from_gptq(*GPTQ, torch.arange(1, 5).repeat_interleave(64))),
    ("does not have 64 inputs of each of 4 groups, but 64 of group -1; expected",
     lambda: packed_from_gptq(*GPTQ, torch.arange(-1, 3).repeat_interleave(64))),
    ("zero_offset is 2; expected 0 or 1", lambda: packed_from_gptq(*GPTQ, zero_offset=2)),
]  # fmt: skip


@wrong_calls(WRONG)
def test_wrong_calls(wrong: WrongCall) -> None:
    assert_refused(wrong)
