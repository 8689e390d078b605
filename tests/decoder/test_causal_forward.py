"""A step of a decoder-only model: the logits of the reference, and the same bits in any company."""

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lmdecode import reference
from lmdecode.decoder.causal_caches import BLOCK_SIZE
from lmdecode.linear.formats import FORMATS, format_of_head
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.weights import CausalWeights
from lmdecode.reference import causal as causal_reference
from lmdecode.reference.causal import CausalCache, causal_logits
from tests.decoder.causal_steps import (
    Entry,
    free_blocks,
    generated_logits,
    new_caches,
    packed,
    parts,
    prompt_logits,
    step,
    wide,
)
from tests.support.causal_models import CASES, VOCAB, WINDOW, random_tokens
from tests.support.op_contract import on_threads

LENGTH = 6 * WINDOW + 3

cases = pytest.mark.parametrize(("architecture", "variant"), CASES)
# Of each kind of cache: one that keeps all, one with a window, both; and one with positions.
FEW_CASES = [
    ("llama", "plain"),
    ("mistral", "window"),
    ("gemma3_text", "capped"),
    ("smollm3", "these slide, biases"),
    ("gpt2", "odd heads, no scale"),
    ("gpt_oss", "plain"),
    ("qwen3_moe", "few of many"),
    ("gemma4_text", "experts, shared keys, inputs of layers"),
    ("gemma4_text", "values are keys, biases, untied"),
]
few_cases = pytest.mark.parametrize(("architecture", "variant"), FEW_CASES)


def check_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def error(got: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to what is expected."""
    assert expected.isfinite().all()
    return float((got - expected).norm() / expected.norm())


@functools.cache
def reference_logits(architecture: str, variant: str) -> Tensor:
    """Return the reference's logits of the text of ``LENGTH`` tokens; tests share them."""
    return causal_logits(*parts(architecture, variant), random_tokens(LENGTH))


@cases
def test_logits_are_the_references(architecture: str, variant: str) -> None:
    model, text = packed(architecture, variant), random_tokens(LENGTH)
    expected = reference_logits(architecture, variant)
    check_near(prompt_logits(new_caches(model), text), expected)
    check_near(generated_logits(new_caches(model), text), expected)
    caches = new_caches(model)
    prompt, rest = text.split((2 * WINDOW, LENGTH - 2 * WINDOW))
    check_near(prompt_logits(caches, prompt), expected[: 2 * WINDOW])
    check_near(generated_logits(caches, rest), expected[2 * WINDOW :])
    assert caches.lengths.tolist() == [LENGTH]


@cases
def test_a_text_may_be_read_in_any_parts(architecture: str, variant: str) -> None:
    """Of entries, and of the rows that are computed together; generated tokens, too."""
    model, text = packed(architecture, variant), random_tokens(LENGTH)
    for read in (prompt_logits, generated_logits):
        expected = read(new_caches(model), text, LENGTH)
        for max_rows in (1, 3, 37):
            got = read(new_caches(model, max_rows=max_rows), text, LENGTH)
            assert got.equal(expected), max_rows
        assert read(new_caches(model), text, 1, WINDOW, LENGTH - WINDOW - 3, 2).equal(expected)
        pieces = (5, 20, LENGTH - 26, 1)
        assert read(new_caches(model, max_rows=8), text, *pieces).equal(expected)


def test_logits_of_the_last_tokens() -> None:
    """Of as many as an entry wants, and in the order of entries, prompts or not."""
    model, texts = packed("gemma3_text", "plain"), [random_tokens(9, seed) for seed in range(4)]
    alone = [prompt_logits(new_caches(model), text) for text in texts]
    generated = generated_logits(new_caches(model), texts[1])
    for max_rows in (1, 4, 64):
        caches = new_caches(model, 4, max_rows=max_rows)
        got = step(
            caches,
            Entry(2, texts[0], num_logits=3),
            Entry(3, texts[1], False, num_logits=4),
            Entry(0, texts[2], num_logits=0),
            Entry(1, texts[3], num_logits=1),
        )
        expected = [alone[0][-3:], generated[-4:], alone[2][:0], alone[3][-1:]]
        assert [len(logits) for logits in got] == [3, 4, 0, 1]
        assert all(map(torch.equal, got, expected)), max_rows
        assert step(caches, Entry(0, texts[1][:1], num_logits=0))[0].shape == (0, VOCAB)
    nothing = caches.forward(torch.empty(0, dtype=torch.int64), torch.empty(0, 4).long(), 0)
    assert nothing.shape == (0, VOCAB)
    assert caches.lengths.tolist() == [10, 9, 9, 9]


@pytest.mark.parametrize("case", [("mistral", "window"), ("gemma3_text", "plain")], ids=str)
def test_texts_far_longer_than_the_window(case: tuple[str, str]) -> None:
    text = random_tokens(1500)
    config, weights = parts(*case)
    cache = CausalCache()
    expected = torch.cat(
        [causal_logits(config, weights, piece, cache=cache) for piece in text.split(300)]
    )
    caches = new_caches(packed(*case), max_length=1500, max_rows=100)
    check_near(prompt_logits(caches, text[:900]), expected[:900])
    check_near(generated_logits(caches, text[900:1400]), expected[900:1400])
    check_near(prompt_logits(caches, text[1400:]), expected[1400:])


def rounding_reference(format_: str, head: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference multiply as packed weights do, inputs rounded, too."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_head = weight.data_ptr() == head.data_ptr()
        dtype = format_of_head(format_) if is_head else format_
        return reference.packed_linear(x, weight.detach(), bias, dtype=dtype)

    functional = types.SimpleNamespace(**{**vars(causal_reference.F), "linear": linear})
    monkeypatch.setattr(causal_reference, "F", functional)


def _rounded_rows(table: Tensor, weight_format: str) -> Tensor:
    """Return the rows of tokens as a model of this format has them."""
    if weight_format == "bfloat16":
        return table.bfloat16()
    q, scales = reference.quantize_rows(reference.rotate_rows(table.detach().float()))
    return reference.rotate_rows(q * scales[:, None])  # a row of int8, turned back


def check_format_of_weights(
    model: PackedCausalModel,
    weights: CausalWeights,
    weight_format: str,
    exact: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left are roundings that a last bit turned; they do not stay small in every case."""
    text = random_tokens(LENGTH)
    head = weights.embedding if weights.logits is None else weights.logits
    rounding_reference(weight_format, head, monkeypatch)
    embedding = _rounded_rows(weights.embedding, weight_format)
    rounded = weights._replace(embedding=embedding, logits=head)
    if (table := weights.per_layer_embedding) is not None:
        rounded = rounded._replace(per_layer_embedding=_rounded_rows(table, weight_format))
    expected = causal_logits(model.config, rounded, text)
    for read in (prompt_logits, generated_logits):
        got = read(new_caches(model), text)
        assert error(got, expected) < error(got, exact) / 3


@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "int4"])
@cases
def test_formats_of_weights(
    architecture: str, variant: str, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, exact = (
        packed(architecture, variant, weight_format),
        reference_logits(architecture, variant),
    )
    weights = parts(architecture, variant)[1]
    check_format_of_weights(model, weights, weight_format, exact, monkeypatch)


def test_formats_of_the_embedding() -> None:
    """The projection's own rows where they are the same, else float32, bfloat16, or packed rows."""
    tied, other = ("olmo2", "groups, biases"), ("llama", "plain")
    formats = {
        (case, kind): packed(*case, kind).record["embedding_format"]
        for case in (tied, other)
        for kind in FORMATS
    }
    assert [formats[tied, kind] for kind in FORMATS] == [0, 0, 0, 0]
    assert [formats[other, kind] for kind in FORMATS] == [1, 2, 3, 3]
    embedding = parts(*tied)[1].embedding
    assert len(packed(*tied).memory) < len(packed(*other).memory) + embedding.nbytes


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("int8", 0.1)])
@cases
def test_formats_of_caches(architecture: str, variant: str, dtype: str, tolerance: float) -> None:
    model, text = packed(architecture, variant), random_tokens(LENGTH)
    expected = prompt_logits(new_caches(model), text)
    for read in (prompt_logits, generated_logits):
        got = read(new_caches(model, dtype=dtype), text, LENGTH)
        assert 1e-4 < error(got, expected) < tolerance
        for max_rows in (1, 37):
            caches = new_caches(model, dtype=dtype, max_rows=max_rows)
            assert read(caches, text, 20, LENGTH - 20).equal(got)


class Text:
    """A text of pieces, prompts or generated, and what is read of it alone."""

    def __init__(self, choose: random.Random, model: PackedCausalModel, seed: int, **options: Any):
        tokens = random_tokens(choose.randint(20, 100), seed) % model.config.vocab_size
        self.pieces = list[tuple[Tensor, bool]]()
        prompt = choose.randint(1, len(tokens))
        while len(tokens):
            is_prompt = prompt > 0
            most = min(prompt, 40) if is_prompt else 3
            piece = tokens[: choose.randint(1, most)]
            self.pieces.append((piece, is_prompt))
            tokens, prompt = tokens[len(piece) :], prompt - len(piece)
        caches = new_caches(model, **options)
        self.expected = torch.cat([step(caches, Entry(0, *p))[0] for p in self.pieces])
        self.got = list[Tensor]()


def check_company(model: PackedCausalModel, seed: int, max_rows: int, **options: Any) -> None:
    choose = random.Random(seed)
    texts = [Text(choose, model, seed + i, **options) for i in range(5)]
    caches = new_caches(model, 7, max_rows=max_rows, **options)
    places = choose.sample(range(7), 5)
    while waiting := [i for i, text in enumerate(texts) if text.pieces]:
        some = choose.sample(waiting, choose.randint(1, len(waiting)))
        entries = [Entry(places[i], *texts[i].pieces.pop(0)) for i in some]
        for i, logits in zip(some, step(caches, *entries), strict=True):
            texts[i].got.append(logits)
    for text in texts:
        assert torch.cat(text.got).equal(text.expected)


@cases
def test_alone_and_in_any_company(architecture: str, variant: str) -> None:
    """Prompts and generated tokens of others may be read in the same step, in any order."""
    for seed, max_rows in ((0, 3), (1, 37), (2, 512)):
        check_company(packed(architecture, variant), seed, max_rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_company_in_every_format(weight_format: str, dtype: str) -> None:
    for case in FEW_CASES:
        check_company(packed(*case, weight_format), 3, 29, dtype=dtype)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_any_number_of_threads(weight_format: str) -> None:
    model = wide(weight_format)
    vocab = model.config.vocab_size
    texts = [torch.arange(length) * 7919 % vocab for length in (150, 1, 61)]
    generated = torch.arange(3) * 101

    def logits() -> Tensor:
        caches = new_caches(model, 6, max_rows=128)
        prompts = [Entry(place, text) for place, text in enumerate(texts)]
        others = [Entry(place, generated, False) for place in (4, 5)]
        read = step(caches, prompts[0], others[0], *prompts[1:])
        return torch.cat(read + step(caches, Entry(2, generated, False), others[1]))

    on_threads(logits, (1, 2, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@few_cases
def test_beams_that_share_are_those_that_do_not(
    architecture: str, variant: str, dtype: str
) -> None:
    """Blocks that beams have in common, against caches that read each beam's own text."""
    model, choose = packed(architecture, variant), random.Random(7)
    prompt, beams = random_tokens(70), 4
    shared = new_caches(model, beams, dtype=dtype, max_rows=16)
    step(shared, Entry(0, prompt, num_logits=1))
    shared.reorder(torch.zeros(beams, dtype=torch.int64))
    texts: list[list[int]] = [[] for _ in range(beams)]
    for number in range(60):
        tokens = [choose.randrange(3, VOCAB) for _ in range(beams)]
        entries = [Entry(i, torch.tensor([token]), False) for i, token in enumerate(tokens)]
        got = torch.cat(step(shared, *entries))
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        if number % 10 == 9:
            own = new_caches(model, beams, dtype=dtype)
            step(own, *(Entry(i, prompt, num_logits=1) for i in range(beams)))
            whole = [Entry(i, torch.tensor(text), False, 1) for i, text in enumerate(texts)]
            assert got.equal(torch.cat(step(own, *whole)))
        if choose.random() < 0.6:
            parents = [choose.randrange(beams) for _ in range(beams)]
            shared.reorder(torch.tensor(parents))
            texts = [texts[parent] for parent in parents]
    assert shared.lengths.tolist() == [130] * beams


def test_beams_share_their_prompt() -> None:
    caches = new_caches(packed("gemma3_text", "plain"), 4, max_rows=16)
    before = free_blocks(caches)
    step(caches, Entry(2, random_tokens(70), num_logits=1))
    one = free_blocks(caches)
    assert [a - b for a, b in zip(before, one, strict=True)] == [3, 1]  # the window begins at 64
    caches.reorder(torch.full((4,), 2))
    assert free_blocks(caches) == one
    # The last block is not full: all but one write to a copy of it.
    step(caches, *(Entry(i, torch.tensor([5]), False) for i in range(4)))
    assert [a - b for a, b in zip(one, free_blocks(caches), strict=True)] == [3, 3]
    caches.truncate(range(4), [0] * 4)
    assert free_blocks(caches) == before
    assert caches.lengths.tolist() == [0] * 4


@few_cases
def test_going_back_and_reading_again(architecture: str, variant: str) -> None:
    """As if what was read in between had not been; a place that was freed is like a new one."""
    model, text = packed(architecture, variant), random_tokens(100)
    other = random_tokens(100, 1)
    expected = prompt_logits(new_caches(model), text)
    caches = new_caches(model, 3)
    step(caches, Entry(0, text[:60]), Entry(1, other))
    step(caches, Entry(0, other[:3]))  # not beyond the block at 64: it is still there
    caches.truncate([0, 1], [60, 0])
    assert caches.lengths.tolist() == [60, 0, 0]
    got = step(caches, Entry(1, text), Entry(0, text[60:]))
    assert got[0].equal(expected) and got[1].equal(expected[60:])
    caches.truncate([1, 0], [100, 0])  # nothing, and all
    assert step(caches, Entry(1, other[:1]), Entry(0, text))[1].equal(expected)


def test_going_back_beyond_the_window() -> None:
    caches = new_caches(packed("mistral", "window"))
    prompt_logits(caches, random_tokens(150))
    before = [tensor.clone() for tensor in caches._tensors[1:]]
    for length in (1, 101, 133):
        message = rf"lengths\[0\] goes back to {length} of 150 positions; .* window, {WINDOW} "
        with pytest.raises(ValueError, match=message):
            caches.truncate([0], [length])
    assert all(map(torch.equal, before, caches._tensors[1:]))
    caches.truncate([0], [134])  # whose window begins at 128, where a block does
    assert caches.lengths.tolist() == [134]


@few_cases
def test_a_shared_text_that_goes_back(architecture: str, variant: str) -> None:
    """What one of two sequences takes back stays the other's."""
    model, text = packed(architecture, variant), random_tokens(90)
    expected = prompt_logits(new_caches(model), text)
    caches = new_caches(model, 2)
    prompt_logits(caches, text[:60])
    caches.reorder(torch.zeros(2, dtype=torch.int64))
    caches.truncate([0], [58])
    other = random_tokens(30, 1)
    got = step(caches, Entry(0, torch.cat((text[58:60], other))), Entry(1, text[60:]))
    assert got[0][:2].equal(expected[58:60])
    assert got[1].equal(expected[60:])
    alone = prompt_logits(new_caches(model), torch.cat((text[:60], other)))
    assert got[0][2:].equal(alone[60:])


@pytest.mark.parametrize("max_rows", [1, 3, 50])
def test_blocks_behind_the_window_are_let_go(max_rows: int) -> None:
    """A block goes as soon as no query to come sees a key of it."""
    length = 40 * BLOCK_SIZE
    caches = new_caches(packed("gemma3_text", "plain"), 2, length, max_rows=max_rows)
    full, window = free_blocks(caches)
    assert full == 2 * 40 and window == 2 * (-(-(WINDOW + max_rows) // BLOCK_SIZE) + 2)
    at = 0
    for count in (200, 1, 1, *[5] * 20, *[64] * 15, 17, 1):
        step(caches, Entry(1, random_tokens(count), count > 6, 0))
        at += count
        used = -(-at // BLOCK_SIZE)
        first = max(0, at - WINDOW + 1) // BLOCK_SIZE
        assert free_blocks(caches) == [full - used, window - (used - first)]
    assert at == length


def test_memory_of_windows_is_enough_for_beams() -> None:
    """At any length, whatever they share."""
    model, choose = packed("mistral", "window"), random.Random(3)
    caches = new_caches(model, 5, 3000, max_rows=4)
    for _ in range(300):
        counts = [choose.choice((0, 1, 1, 4, 9)) for _ in range(5)]
        entries = [
            Entry(i, random_tokens(count), choose.random() < 0.5, 1)
            for i, count in enumerate(counts)
            if count
        ]
        if entries:
            assert torch.cat(step(caches, *entries)).isfinite().all()
        caches.reorder(torch.tensor([choose.randrange(5) for _ in range(5)]))
    assert int(caches.lengths.max()) > 20 * BLOCK_SIZE


CAPABILITY_SCRIPT = """
import pytest
from tests.decoder import test_causal_forward as tests

for case in tests.FEW_CASES:
    tests.test_logits_are_the_references(*case)
    tests.test_a_text_may_be_read_in_any_parts(*case)
    tests.test_formats_of_caches(*case, "bfloat16", 0.03)
    tests.test_formats_of_caches(*case, "int8", 0.1)
    tests.test_beams_that_share_are_those_that_do_not(*case, "int8")
    for weight_format in ("bfloat16", "int8", "int4"):
        with pytest.MonkeyPatch.context() as patch:
            tests.test_formats_of_weights(*case, weight_format, patch)
for weight_format, dtype in zip(tests.FORMATS, ("float32", "int8", "bfloat16", "float32")):
    tests.test_company_in_every_format(weight_format, dtype)
"""


@pytest.mark.slow
def test_cpu_capability(run_at_capability: Callable[[str], list[str]]) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []
