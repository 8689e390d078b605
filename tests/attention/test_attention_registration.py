"""The attention ops as torch wants them: opcheck, torch.compile, export, fakes."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import lmdecode

OPS = torch.ops.lmdecode


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = normal(2, 4, 5, 16), normal(2, 2, 9, 16, seed=1), normal(2, 2, 9, 24, seed=2)
NUMBERS = (3, 0, 0.25, 0.0)
PER_HEAD = (normal(4), normal(4).abs())
POSITIONS, LENGTHS = torch.arange(10).view(2, 5), torch.tensor([9, 4])
# The rows of K and V as blocks of 9, and as rows of a cache.
BLOCKS = torch.tensor([[1, 0], [0, -1]], dtype=torch.int32)
ROWS = (torch.arange(20, dtype=torch.int32).view(2, 10) % 3) % 2
PADDING = torch.arange(18).view(2, 9) % 3 > 0


@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck_attention(return_lse: bool) -> None:
    op = OPS.sliding_window_attention.default
    none, ends = [None] * 6, (torch.tensor([0, 2, 10]), torch.tensor([0, 9, 18]))
    opcheck(op, (Q, K, V, *NUMBERS, *none, None, False, *[None] * 3, return_lse))
    opcheck(op, (Q.bfloat16(), K.bfloat16(), V.bfloat16(), -1, -1, 0.3, 5.0, *PER_HEAD, POSITIONS,
                 LENGTHS, None, None, None, False, PADDING, None, None, return_lse))  # fmt: skip
    ragged = [x.transpose(1, 2).flatten(0, 1) for x in (Q, K, V)]
    opcheck(op, (*ragged, *NUMBERS, *[None] * 4, *ends, None, False, *[None] * 3, return_lse))
    mask = torch.arange(45).view(1, 1, 5, 9) % 4 > 0
    opcheck(op, (Q, K, V, -1, 0, 0.3, 0.0, *none, mask, True, *[None] * 3, return_lse))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, K, V)]
    opcheck(op, (*strided, *NUMBERS, *none, None, False, *[None] * 3, return_lse))
    for table in ((BLOCKS, None), (None, ROWS)):
        places = (*[None] * 3, LENGTHS, *[None] * 3, False, None, *table)
        opcheck(op, (Q, K, V, *NUMBERS, *places, return_lse))


@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck_decode(return_lse: bool) -> None:
    op = OPS.sliding_window_decode.default
    opcheck(op, (Q, K, V, *NUMBERS, *[None] * 7, return_lse))
    opcheck(op, (Q.half(), K.half(), V.half(), -1, -1, 0.3, 5.0, *PER_HEAD, POSITIONS, LENGTHS,
                 PADDING, None, None, return_lse))  # fmt: skip
    for table in ((BLOCKS, None), (None, ROWS)):
        opcheck(op, (Q, K, V, *NUMBERS, *[None] * 3, LENGTHS, None, *table, return_lse))


def test_opcheck_merge() -> None:
    op = OPS.merge_attention_states.default
    opcheck(op, (Q, normal(2, 4, 5), normal(2, 4, 5, 16, seed=3), normal(2, 4, 5, seed=4)))
    ragged = normal(5, 4, 16).bfloat16()
    opcheck(op, (ragged, normal(4, 5), -ragged, normal(4, 5, seed=4)))


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Prefill and decoding, merged: arithmetic around each op."""
    first = lmdecode.sliding_window_attention(q * 2.0, k, v, window=4, return_lse=True, **options)
    second = lmdecode.sliding_window_decode(q, k, v + 1.0, window=4, return_lse=True, **options)
    out, lse = lmdecode.merge_attention_states(*first, *second)
    return out + lse[..., None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.slow
def test_compile(backend: str) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    options = {"sinks": PER_HEAD[0].bfloat16(), "kv_lengths": LENGTHS.int(), "softcap": 10.0}
    for arguments in ({}, options, {"q_positions": POSITIONS[0], "key_padding_mask": PADDING}):
        torch.testing.assert_close(compiled(Q, K, V, **arguments), step(Q, K, V, **arguments))


def test_compile_with_a_growing_cache() -> None:
    """A graph for the first length, one for every other."""

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return lmdecode.sliding_window_decode(q, k, v, window=6) * 2.0

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    q, k, v = Q[:, :, :1], normal(2, 2, 40, 16), normal(2, 2, 40, 16, seed=1)
    for length in range(3, 40, 5):
        arguments = (q, k[:, :, :length], v[:, :, :length])
        assert torch.equal(compiled(*arguments), decode(*arguments))
    assert counter.frame_count <= 2


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = lmdecode.sliding_window_attention(q, k, v, window=3)
        assert isinstance(out, torch.Tensor)
        return out


def test_export() -> None:
    tokens, keys = torch.export.Dim("tokens", min=2), torch.export.Dim("keys", min=2)
    program = torch.export.export(
        Attention(), (Q, K, V), dynamic_shapes=({2: tokens}, {2: keys}, {2: keys})
    )
    for queries, length in ((4, 9), (5, 3)):
        arguments = (Q[:, :, :queries], K[:, :, :length], V[:, :, :length])
        assert torch.equal(program.module()(*arguments), Attention()(*arguments))


def test_fakes_know_shapes_dtypes_and_devices() -> None:
    def same(fakes: Any, reals: Any) -> None:
        for fake, real in zip(fakes, reals, strict=True):
            assert fake.device.type == "meta"
            assert (fake.shape, fake.dtype, fake.stride()) == (
                real.shape, real.dtype, real.stride(),
            )  # fmt: skip

    for dtype in (torch.float32, torch.bfloat16):
        real = [x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, K, V)]
        fake = [x.to("meta") for x in real]
        for op in (lmdecode.sliding_window_attention, lmdecode.sliding_window_decode):
            outputs = op(*real, return_lse=True)
            same(op(*fake, return_lse=True), outputs)
        ragged = [x.transpose(1, 2).flatten(0, 1) for x in real]
        ends = {"cu_seqlens_q": torch.tensor([0, 10]), "cu_seqlens_kv": torch.tensor([0, 18])}
        want = lmdecode.sliding_window_attention(*ragged, **ends, return_lse=True)
        fake_ends = {name: value.to("meta") for name, value in ends.items()}
        got = lmdecode.sliding_window_attention(
            *(x.to("meta") for x in ragged), **fake_ends, return_lse=True
        )
        same(got, want)
        for state in (outputs, want):
            merged = lmdecode.merge_attention_states(*state, *state)
            meta = [x.to("meta") for x in state]
            same(lmdecode.merge_attention_states(*meta, *meta), merged)
