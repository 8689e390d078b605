"""The decoder ops are registered as torch wants it, and refuse what does not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.library import opcheck

import lmdecode
from lmdecode import BeamRequest
from lmdecode.beam.state import beam_parameters, new_beam_state
from lmdecode.beam.token_rules import new_token_rules
from lmdecode.decoder.searches import DecodingSearches
from lmdecode.models.huge_memory import new_memory
from lmdecode.models.packed_stack import PackedDecoder
from lmdecode.models.record import read_record
from tests.decoder.random_decoder import random_decoder
from tests.support.records import with_entries

ops = torch.ops.lmdecode


def running_search(kind: str = "post_norm") -> DecodingSearches:
    batch = lmdecode.Decoding(*random_decoder(kind)).batch(
        max_requests=2, num_beams=3, capacity=10, source=5
    )
    # Nothing that was never written: opcheck compares all that an op may write.
    for cache in batch._slots.searches.caches[:4]:
        cache.zero_()
    batch._slots.searches._workspace.zero_()
    for length in (5, 2):
        request = BeamRequest([1, 4], num_beams=3, max_new_tokens=6, eos_token_id=2)
        batch.add(request, torch.randn(length, 18, generator=torch.Generator().manual_seed(1)))
    return batch._slots.searches


def step_arguments(searches: DecodingSearches) -> tuple[Any, ...]:
    return (
        *searches.decoder.of_model,
        list(searches.state),
        list(searches.parameters),
        list(searches.token_rules),
        list(searches.caches),
        searches._workspace,
        [*searches._options, 2, 0, 1],
    )


def test_logits_of_a_step_are_written_to_the_rows_that_go_on() -> None:
    searches = running_search()
    searches.state.done[0] = 1
    logits = searches.read_tokens()
    assert (logits[:3] == 0.0).all() and (logits[3:] != 0.0).all()
    assert searches.state.lengths.tolist() == [2, 2]  # nothing was chosen
    with_choice = torch.zeros_like(logits)
    assert searches.run(1, logits=with_choice) == 1
    assert with_choice.equal(logits)
    assert searches.state.lengths.tolist() == [2, 3]


def test_scores_of_a_step_in_which_nothing_is_chosen() -> None:
    """They are those of a step that chooses: the log-probabilities after the rules."""
    searches, chosen = running_search(), running_search()
    for each in (searches, chosen):
        each.state.done[0] = 1
        each.token_rules.timestamps[1] = torch.tensor([30, 2, 1, 36])
        each.token_rules.bans[1, 0] = torch.tensor([5, 0, 1 << 40, 0])
    lengths = searches.state.lengths.clone()
    found, expected = torch.zeros(2, 6, 40), torch.zeros(2, 6, 40)
    searches.read_tokens(found)
    assert searches.state.lengths.equal(lengths)
    chosen.run(1, logits=expected)
    assert found.equal(expected)
    scores = found[1, 3:]
    assert (scores[:, 29] == -torch.inf).all() and (scores[:, 5] == -torch.inf).all()
    before = found[0, 3:].log_softmax(dim=-1)
    there = scores > -torch.inf
    assert there.any() and torch.allclose(scores[there], before[there])


def test_logits_in_the_memory_of_another_argument() -> None:
    searches = running_search()
    size = 4 * 6 * 40
    decoder, caches = searches.decoder, searches.caches
    for name, logits in (
        ("weights", decoder.memory[-size:].view(torch.float32).view(6, 40)),
        ("weights", decoder.embedding.view(-1)[:240].view(6, 40)),
        ("caches", caches.self_values.view(-1)[:240].view(6, 40)),
        ("caches", caches.cross_keys.view(-1)[100:340].view(6, 40)),
        ("workspace", searches._workspace[-size:].view(torch.float32).view(6, 40)),
    ):
        before = [tensor.clone() for tensor in (*searches.state, *caches)]
        message = f": logits shares memory with {name}; expected a tensor of its own"
        with pytest.raises(ValueError, match=message):
            searches.run(1, logits=logits)
        after = (*searches.state, *caches)
        assert all(map(torch.equal, after, before))


def test_decoding_workspace_bytes() -> None:
    searches = running_search()
    slots, beams, capacity = searches.state.sequences.shape
    bans = searches.token_rules.bans.shape[1]
    _, _, num_groups, num_candidates = searches._options
    sizes = [slots, beams, capacity, num_groups, num_candidates, bans]
    arguments = (searches.decoder.memory, sizes)
    opcheck(ops.decoding_workspace_bytes.default, arguments)
    assert ops.decoding_workspace_bytes(*arguments) == searches._workspace.numel()


def two_groups(vocab: int = 40, end_tokens: list[int] | None = None) -> DecodingSearches:
    """One request of two groups of two beams by "scorer"; the prompt is one token."""
    decoder = PackedDecoder(*random_decoder("post_norm", vocab=vocab))
    state = new_beam_state(2, 2, 10)
    state.sequences[:, :, 0] = 1
    state.lengths.fill_(1)
    parameters = beam_parameters(2, 2, end_tokens=end_tokens or [2], max_lengths=8)
    searches = DecodingSearches(
        decoder, state, parameters, new_token_rules(2), 5,
        num_groups=2, num_candidates=6, dialect="scorer",
    )  # fmt: skip
    searches.read_memory(torch.ones(1, 5, 18), torch.tensor([5]), torch.arange(1))
    return searches


def put(searches: DecodingSearches, where: str, value: Any) -> None:
    """Write to an element of a tensor, ``state.lengths[0]`` or the like."""
    part, _, rest = where.partition(".")
    name, _, index = rest.partition("[")
    places = tuple(int(place) for place in index.rstrip("]").split(","))
    getattr(getattr(searches, part), name)[places] = value


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("state.sequences[1,0,1]", 40),
        ("state.sequences[0,0,0]", -1),
        ("token_rules.repetition_penalty[1]", 0.0),
        ("token_rules.timestamps[1,0]", 40),
        ("token_rules.timestamps[0,0]", 0),
    ],
)
def test_values_out_of_range(where: str, value: Any) -> None:
    searches = running_search()
    put(searches, where, value)
    before = [tensor.clone() for tensor in (*searches.state, *searches.caches)]
    part, name = where.partition("[")[0].split(".")
    with pytest.raises(ValueError, match=rf"{part}\.{name}\["):
        searches.run(1)
    for old, new in zip(before, (*searches.state, *searches.caches), strict=True):
        assert old.equal(new)


def test_a_table_out_of_range() -> None:
    searches = running_search()
    searches.run(2)
    searches.caches.table[1, 0] = 6
    with pytest.raises(ValueError, match=r"caches.table\[1, 0\] is 6"):
        searches.run(1)


def test_a_group_without_its_first_one() -> None:
    """Nobody would read its prompt, and its table has not been written."""
    searches = two_groups()
    searches.state.lengths[1] = 4
    searches.caches.table.fill_((1 << 31) - 1)
    with pytest.raises(ValueError, match=r"caches.cached_lengths\[0\] is 0; expected 3"):
        searches.run(1)


def test_a_vocabulary_of_end_tokens() -> None:
    """No candidate can go on, and none is made up behind the vocabulary."""
    searches = two_groups(vocab=2, end_tokens=[0, 1])
    searches.run(5)
    assert int(searches.state.sequences.max()) < 2


def other_memory(memory: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """A copy, aligned to 64, with other bytes."""
    copy = new_memory(memory.numel()).copy_(memory)
    change(copy)
    return copy


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, "holds other bytes than a packed weight"),
        (1, 1, "has format bfloat16; expected float32"),
        (2, 1, "was made at another CPU capability"),
        (6, 5, r"is a weight of shape \[40, 5\]; expected \[40, 22\], from config"),
    ],
)
def test_other_packed_weights(place: int, value: int, message: str) -> None:
    arguments = list(step_arguments(running_search()))
    at, _ = read_record(arguments[1])["weights.logits"]
    arguments[1] = other_memory(
        arguments[1], lambda m: m[at : at + 64].view(torch.int32)[place].fill_(value)
    )
    with pytest.raises(ValueError, match=f"weights.logits {message}"):
        ops.decoding_steps_(*arguments)


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_a_meta_tensor_in_a_list(number: int) -> None:
    arguments = list(step_arguments(running_search()))
    arguments[number] = [arguments[number][0].to("meta"), *arguments[number][1:]]
    with pytest.raises(ValueError, match=r"\[0\] is on meta"):
        ops.decoding_steps_(*arguments)


TREE, BEGINS = lmdecode.Trie([[5, 2]]).tensors


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_tries_and_rules_that_go_on_with_any_token() -> None:
    arguments = list(step_arguments(running_search()))
    arguments[4] = [*arguments[4], numbers(0, -1), TREE, BEGINS]
    opcheck(ops.decoding_steps_.default, tuple(arguments), test_utils="test_schema")
    arguments[7] = [1, *arguments[7][1:]]
    with pytest.raises(ValueError, match='token_rules has tries; expected none with the rules "sc'):
        ops.decoding_steps_(*arguments)


def with_entry(name: str, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Give a record another entry."""
    return lambda memory: with_entries(memory, {name: value})


def without_logits(memory: torch.Tensor) -> torch.Tensor:
    return with_entries(memory, {"weights.logits": None, "weights.logits_bias": None})


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, lambda m: m[:-64], "weights has .* bytes; expected .*, as its record says"),
        (1, with_entry("weights.positions", [64 * 256, 44]), "positions has 44 bytes; expected a"),
        (1, with_entry("relative_bias_rows", 1 << 40), "relative_bias_rows is 1099511627776; exp"),
        (1, with_entry("relative_bias_rows", 5), "weights.relative_bias has 5 rows; expected "),
        (1, with_entry("relative_bias_rows", 3), "relative_bias_rows is 3; expected 0 just where"),
        (1, without_logits, "weights have no logits; expected them"),
        (1, with_entry("weights.logits", [1 << 40, 64]), "logits is at byte 1099511627776; expec"),
        (1, with_entry("weights.layers.0.qkv", [32, 64]), "qkv is at byte 32; expected a multiple"),
        (1, with_entry("weights.layers.1.ffn_down", None), "layers.1.ffn_down is absent; expected"),
        (1, with_entry("config.num_layers", 0), "config.num_layers is 0"),
        (1, with_entry("config.norm", "x"), 'config.norm is "x"; expected one of "layer_norm", '),
        (1, with_entry("kind", "encoder"), 'weights are of kind "encoder"; expected "decoder"'),
        (2, lambda s: s[:-1], "state has 13 tensors"),
        (4, lambda r: r[:-1], "token_rules has 6 tensors"),
        (4, lambda r: [*r, numbers(0, 0), TREE], "token_rules has 9 tensors; expected 7, or with"),
        (
            4,
            lambda r: [*r, numbers(0, 1), TREE, BEGINS],
            r"trie_numbers\[1\] is 1; expected -1 to 0",
        ),
        (4, lambda r: [*r, numbers(0), TREE, BEGINS], "token_rules.trie_numbers has shape"),
        (4, lambda r: [*r, numbers(0, 0), TREE, TREE], "child_begin has shape"),
        (5, lambda c: c[:-1], "caches has 6 tensors"),
        (7, lambda o: o[:-1], "options has 6 numbers"),
        (7, lambda o: [3, *o[1:]], "options.rules is 3"),
        (7, lambda o: [o[0], 1, *o[2:]], "expected 1 where it is greedy"),
        (7, lambda o: [*o[:2], 2, *o[3:]], "expected num_groups, 2"),
        (7, lambda o: [*o[:4], -1, *o[5:]], "options.max_steps is -1"),
    ],
)
def test_arguments_that_do_not_fit(number: int, change: Any, message: str) -> None:
    arguments = list(step_arguments(running_search()))
    arguments[number] = change(arguments[number])
    with pytest.raises(ValueError, match=message):
        ops.decoding_steps_(*arguments)


def faster_transformer_arguments() -> list[Any]:
    searches = running_search("pre_norm_gated")
    return [*searches.decoder.of_model, list(searches.caches), [3, 6, 1, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([4, 6, 1, 2], "beam_width is 4; expected a divisor of 6"),
        ([2, 6, 1, 2], "caches.cross_keys has 2 requests; expected 3 or 6"),
        ([3, 11, 1, 2], "expected at least 11, max_seq_len"),
        ([3, 6, 40, 2], "options.start_id is 40"),
        ([3, 6, 1, -1], "options.end_id is -1"),
    ],
)
def test_faster_transformer_options(options: list[int], message: str) -> None:
    arguments = faster_transformer_arguments()
    arguments[-1] = options
    with pytest.raises(ValueError, match=message):
        ops.faster_transformer_decoding_(*arguments)


def test_faster_transformer_with_a_short_relative_bias() -> None:
    arguments = faster_transformer_arguments()
    heads = read_record(arguments[1])["config.num_heads"]
    positions, _ = read_record(arguments[1])["weights.positions"]  # anywhere
    bias = {"relative_bias_rows": heads, "weights.relative_bias": [positions, heads * 5 * 4]}
    arguments[1] = with_entries(arguments[1], bias)
    with pytest.raises(ValueError, match="5 distances; expected at least 6"):
        ops.faster_transformer_decoding_(*arguments)


def test_faster_transformer_with_a_meta_tensor() -> None:
    arguments = faster_transformer_arguments()
    arguments[2] = [*arguments[2][:5], arguments[2][5].to("meta"), arguments[2][6]]
    with pytest.raises(ValueError, match=r"caches\[5\] is on meta"):
        ops.faster_transformer_decoding_(*arguments)
