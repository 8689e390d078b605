"""transformers' own beam search as an oracle, and the comparison with it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lmdecode.integrations.transformers import beam_search
from lmdecode.integrations.transformers.generate_call import CACHE

EVERYTHING = {
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    "output_attentions": True, "output_hidden_states": True,
}  # fmt: skip


@contextlib.contextmanager
def lowest_index_first() -> Iterator[None]:
    """Give ``torch.topk``, which leaves the order of equal values open, that of lmdecode."""
    original = torch.topk

    def topk(input, k, dim=-1, largest=True, sorted=True):
        values, indices = input.sort(dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = original


def both(model: Any, *inputs: Any, seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    """Return what transformers and what lmdecode generate."""
    arguments = {"do_sample": False} | arguments
    torch.manual_seed(seed)
    with lowest_index_first():
        expected = model.generate(*inputs, **arguments)
    torch.manual_seed(seed)
    return expected, model.generate(*inputs, **arguments, custom_generate=beam_search)


def assert_same(expected: Any, got: Any) -> None:
    """Compare two outputs of ``generate()``: tokens exactly, numbers within 1e-5."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        return
    assert type(got) is type(expected)
    assert got.keys() == expected.keys()
    for name in ("sequences", "beam_indices"):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0)
    for name in expected.keys() - {"sequences", "beam_indices", CACHE}:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
    if CACHE in expected:
        assert type(got.past_key_values) is type(expected.past_key_values)
        length = expected.past_key_values.get_seq_length()
        assert got.past_key_values.get_seq_length() == length
