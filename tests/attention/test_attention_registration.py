"""The attention ops in graphs of torch.compile and torch.export."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lmdecode
from tests.support.random_tensors import randn as normal

pytestmark = pytest.mark.usefixtures("fresh_compiler")


Q, K, V = normal(2, 4, 5, 16), normal(2, 2, 9, 16, seed=1), normal(2, 2, 9, 24, seed=2)
SINKS, LENGTHS = normal(4).bfloat16(), torch.tensor([9, 4], dtype=torch.int32)
POSITIONS, PADDING = torch.arange(5), torch.arange(18).view(2, 9) % 3 > 0


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Prefill and decoding, merged: arithmetic around each op."""
    first = lmdecode.sliding_window_attention(q * 2.0, k, v, window=4, return_lse=True, **options)
    second = lmdecode.sliding_window_decode(q, k, v + 1.0, window=4, return_lse=True, **options)
    out, lse = lmdecode.merge_attention_states(*first, *second)
    return out + lse[..., None]


@pytest.mark.slow
def test_compile() -> None:
    """The ops with the least and the most arguments in graphs; one with code around them."""
    options = {"sinks": SINKS, "kv_lengths": LENGTHS, "softcap": 10.0}
    for backend, arguments in (
        ("aot_eager", {}),
        ("inductor", options),
        ("aot_eager", {"q_positions": POSITIONS, "key_padding_mask": PADDING}),
    ):
        compiled = torch.compile(step, fullgraph=True, backend=backend)
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
