"""Keys and values of sequences, read from caches and written to others that begin with them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode.decoder.causal_caches import BLOCK_SIZE, CausalCaches
from tests.decoder.causal_steps import (
    Entry,
    free_blocks,
    generated_logits,
    new_caches,
    packed,
    prompt_logits,
    state,
    step,
)
from tests.support.causal_models import WINDOW, random_tokens

ops = torch.ops.lmdecode
PROMPT, ANSWER = random_tokens(70, 3), random_tokens(12, 4)
# All layers full, all with a window, some of either.
MODELS = [("llama", "plain"), ("mistral", "window"), ("gemma3_text", "plain")]


def answer(caches: CausalCaches, begin: int = 0) -> Tensor:
    """Read the rest of the prompt and an answer; returns the logits of both's ends."""
    return torch.cat([prompt_logits(caches, PROMPT[begin:])[-1:], generated_logits(caches, ANSWER)])


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(
    ("weights", "dtype"), [("float32", "float32"), ("int8", "bfloat16"), ("bfloat16", "int8")]
)
def test_a_sequence_goes_on_from_what_another_read(
    model: tuple[str, str], weights: str, dtype: str
) -> None:
    whole = answer(new_caches(packed(*model, weights), dtype=dtype))
    for length in (1, WINDOW - 1, WINDOW, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + WINDOW, 69):
        first = new_caches(packed(*model, weights), dtype=dtype)
        prompt_logits(first, PROMPT[:length])
        second = new_caches(packed(*model, weights), dtype=dtype)
        second.write(0, length, first.read(0))
        assert second.lengths.tolist() == [length]
        assert free_blocks(second) == free_blocks(first)
        assert answer(second, length).equal(whole)
    assert whole.isfinite().all()


def test_what_is_read() -> None:
    model = packed("gemma3_text", "plain")
    caches = new_caches(model, 2)
    step(caches, Entry(0, PROMPT[:40]), Entry(1, PROMPT[:9]))
    before = caches.read(0)
    whole = [torch.equal(keys, values) for keys, values in before]
    assert not any(whole)
    step(caches, Entry(0, PROMPT[40:]))
    after, new = caches.read(0), caches.read(0, 40)
    for layer, window in enumerate(model.config.windows):
        for i in range(2):
            held = 70 if window is None else WINDOW - 1
            assert after[layer][i].shape == (2, held, 12)
            assert new[layer][i].equal(after[layer][i][:, -30:])
            if window is None:
                assert after[layer][i][:, :40].equal(before[layer][i])
    # Another sequence with the same tokens has the same; what was read is a copy.
    other = caches.read(1)[1][0]
    assert other.equal(before[1][0][:, :9])
    caches.truncate([1], [0])
    step(caches, Entry(1, ANSWER))
    assert other.equal(before[1][0][:, :9])


def test_beside_other_sequences_and_shared_later() -> None:
    model = packed("gemma3_text", "plain")
    source = new_caches(model)
    prompt_logits(source, PROMPT)
    expected = generated_logits(source, ANSWER)
    source.truncate([0], [0])
    prompt_logits(source, PROMPT)

    caches = new_caches(model, 3)
    step(caches, Entry(0, ANSWER), Entry(1, PROMPT[:50]))
    alone = caches.read(1)
    caches.write(2, 70, source.read(0))
    caches.reorder(torch.tensor([2, 1, 2]))
    for i, token in enumerate(ANSWER.split(1)):
        logits = step(caches, Entry(0, token, False), Entry(2, token, False))
        assert logits[0].equal(expected[i : i + 1]) and logits[1].equal(expected[i : i + 1])
    assert all(map(torch.equal, sum(caches.read(1), ()), sum(alone, ())))
    caches.truncate([0, 1, 2], [0, 0, 0])
    assert free_blocks(caches) == [pool.shape[3] for pool in caches._tensors[::6]]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([[1, 4]], r"lengths\[0\] names sequence 1, of 12 positions; expected an empty one"),
        ([[0, 4], [0, 4]], r"lengths\[1\] names sequence 0, of 4 positions; expected an empty one"),
    ],
)
def test_sequences_that_cannot_begin(lengths: Any, message: str) -> None:
    caches = new_caches(packed("gemma3_text", "plain"), 3)
    step(caches, Entry(1, ANSWER))
    before = state(caches)
    with pytest.raises(ValueError, match=message):
        ops.causal_caches_start_(caches._tensors, caches.model.cache_windows, torch.tensor(lengths))
    assert all(map(torch.equal, state(caches), before))


@pytest.mark.parametrize("cache", [0, 1])
def test_caches_without_room(cache: int) -> None:
    caches = new_caches(packed("gemma3_text", "plain"), 2)
    needed = [3, 1][cache]
    counters = caches._tensors[6 * cache + 5]
    counters[0] = needed - 1
    before, start = state(caches), torch.tensor([[1, 70]])
    message = rf"caches.counters\[0\] is {needed - 1}; expected {needed} free blocks at least"
    with pytest.raises(ValueError, match=message):
        ops.causal_caches_start_(caches._tensors, caches.model.cache_windows, start)
    assert all(map(torch.equal, state(caches), before))
    counters[0] = needed
    caches._tensors[6 * cache + 4][0] = 1 << 20
    with pytest.raises(ValueError, match=r"caches.free_blocks\[0\] is 1048576; expected 0 to"):
        ops.causal_caches_start_(caches._tensors, caches.model.cache_windows, start)


def test_smaller_blocks_in_one_of_the_caches() -> None:
    """They hold fewer positions, and none behind these is written to."""
    caches = new_caches(packed("gemma3_text", "plain"))
    pool = caches._tensors[6]
    caches._tensors[6] = pool.flatten()[: pool.numel() // 2].view(*pool.shape[:4], 16, 12)
    with pytest.raises(ValueError, match=r"lengths\[1\] is 81; expected 1 to 80"):
        ops.causal_caches_start_(
            caches._tensors, caches.model.cache_windows, torch.tensor([[0, 81]])
        )


def test_keys_and_values_that_do_not_fit() -> None:
    caches = new_caches(packed("gemma3_text", "plain"))
    prompt_logits(caches, PROMPT)
    states = caches.read(0)
    caches.truncate([0], [0])
    free = free_blocks(caches)
    keys, values = states[2]
    wrong: list[tuple[Any, str]] = [
        (states[:2], "shorter"),
        ([*states[:2], (keys, values[:, 1:])], r"values of layer 2 have shape \[2, 5"),
        ([(states[0][0].double(), states[0][1]), *states[1:]], "keys of layer 0 .* dtype torch.fl"),
        ([states[1], *states[1:]], r"layer 0 have shape \[2, 70, 12\] .*; expected \[2, 6, 12\]"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            caches.write(0, 70, given)
        assert caches.lengths.tolist() == [0] and free_blocks(caches) == free
    with pytest.raises(ValueError, match="expected 1 to 160"):
        caches.write(0, 161, states)
    caches.write(0, 70, states)
    with pytest.raises(ValueError, match="of 70 positions; expected an empty one"):
        caches.write(0, 70, states)


def test_more_is_reserved_than_there_is_memory() -> None:
    """It is taken as sequences grow."""
    model = packed("llama", "plain")
    rows = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_size
    caches = CausalCaches(model, 1, 1 << 28)
    assert 4 * rows << 28 >= 64 << 30
    assert generated_logits(caches, ANSWER).equal(generated_logits(new_caches(model), ANSWER))


def test_more_blocks_than_can_be_numbered() -> None:
    with pytest.raises(ValueError, match=r"16384 sequences of 1073741824 tokens .* fewer than 2"):
        CausalCaches(packed("llama", "plain"), 1 << 14, 1 << 30)
