"""Eager models of transformers give a row the bits that it has alone."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from lmdecode import batch_invariant
from tests.eager.models import ENCODERS, EXPERTS, LENGTH, NAMES, model, texts

DTYPES = (torch.float32, torch.bfloat16)
ATTENTIONS = ("sdpa", "eager")
# Rows of a batch, and threads.
BATCHES = ((2, 1), (5, 2), (17, 3), (33, 2))
CACHED = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "phi")


@pytest.fixture(autouse=True)
def _no_gradients(threads: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


def attending(name: str, dtype: torch.dtype, attention: str) -> Any:
    made = model(name, dtype)
    if attention == "sdpa" and not made._supports_sdpa:
        attention = "eager"
    if made._can_set_attn_implementation():
        made.set_attn_implementation(attention)
    return made


def logits(made: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    if made.config.is_encoder_decoder:
        options["decoder_input_ids"] = ids.flip(1)
    elif type(made).__name__ not in ENCODERS:
        options["use_cache"] = False
    return made(input_ids=ids, **options).logits


def assert_rows_alone(made: Any, ids: Tensor) -> None:
    for row in (0, 21):
        torch.set_num_threads(2)
        alone = logits(made, ids[row : row + 1])[0]
        for count, threads in BATCHES:
            torch.set_num_threads(threads)
            place = (row + threads) % count
            others = [i for i in range(len(ids)) if i != row][: count - 1]
            company = [*others[:place], row, *others[place:]]
            assert torch.equal(logits(made, ids[company])[place], alone), (row, count, threads)
    torch.set_num_threads(2)


def rounding(made: Any, ids: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(logits(made, ids).double() - expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_bits_that_they_have_alone(name: str, dtype: torch.dtype) -> None:
    ids = texts(33)
    for attention in ATTENTIONS:
        made = attending(name, dtype, attention)
        with batch_invariant():
            assert_rows_alone(made, ids)
    exact = copy.deepcopy(made).double()
    if name in EXPERTS:
        exact.set_experts_implementation("eager")  # others have no float64
    expected = logits(exact, ids[:3])
    for attention in ATTENTIONS:
        made = attending(name, dtype, attention)
        plain = rounding(made, ids[:3], expected)
        with batch_invariant():
            assert 0 < rounding(made, ids[:3], expected) <= 2 * plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_have_the_bits_that_they_have_alone(name: str, dtype: torch.dtype) -> None:
    """Row 0 is not padded: alone transformers takes its mask away."""
    ids = texts(4)
    lengths = [LENGTH - 3 * row for row in range(4)]
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    for attention in ATTENTIONS:
        made = attending(name, dtype, attention)
        with batch_invariant():
            together = logits(made, ids, mask)
            for row, length in enumerate(lengths):
                alone = logits(made, ids[row : row + 1], mask[row : row + 1])[0]
                assert torch.equal(together[row, :length], alone[:length]), (attention, row)
                # Decoders have the text backwards; a sink stands behind the keys, padding or not.
                if not made.config.is_encoder_decoder and name != "gpt_oss":
                    short = logits(made, ids[row : row + 1, :length])[0]
                    assert torch.equal(short, alone[:length]), (attention, row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_experts_have_the_bits_that_they_have_alone(
    name: str, experts: str, dtype: torch.dtype
) -> None:
    made = attending(name, dtype, "eager")
    usual = made.config._experts_implementation
    made.set_experts_implementation(experts)
    try:
        with batch_invariant():
            assert_rows_alone(made, texts(33))
    finally:
        made.set_experts_implementation(usual)


def log_probabilities(
    made: Any, ids: Tensor, parts: list[int], mask: Tensor | None = None
) -> Tensor:
    """Read the text in parts, with a cache."""
    cache, begin, read = DynamicCache(config=made.config), 0, []
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for end in torch.tensor(parts).cumsum(0).tolist():
        options: dict[str, Any] = {}
        if mask is not None and positions is not None:
            options = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        out = made(input_ids=ids[:, begin:end], past_key_values=cache, **options)
        read.append(torch.log_softmax(out.logits.float(), -1))
        begin = end
    return torch.cat(read, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", CACHED)
def test_tokens_read_one_by_one_have_the_bits_of_the_whole_text(
    name: str, attention: str, dtype: torch.dtype
) -> None:
    made, ids = attending(name, dtype, attention), torch.cat([texts(6)[:3], texts(6)[3:]], 1)
    length, padding = ids.shape[1], 4
    left = torch.nn.functional.pad(ids, (padding, 0))
    mask = torch.ones_like(left)
    mask[:2, :padding] = 0
    left[2] = left[2].roll(-padding)
    with batch_invariant():
        whole = log_probabilities(made, ids, [length])
        assert torch.equal(torch.log_softmax(logits(made, ids).float(), -1), whole)
        assert torch.equal(log_probabilities(made, ids, [1] * length), whole)
        assert torch.equal(log_probabilities(made, ids, [7, 1, 5, length - 13]), whole)
        assert torch.equal(log_probabilities(made, ids[1:2], [1] * length), whole[1:2])
        # Padded on the left, in the company of a longer text.
        steps = [padding + 2] + [1] * (length - 2)
        for parts in ([length + padding], steps):
            found = log_probabilities(made, left, parts, mask)[:2, padding:]
            assert torch.equal(found, whole[:2]), parts
