"""``Trie``: what it holds, its file, and what it refuses; its ops against the reference."""

import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
import lmdecode.reference
from lmdecode import BeamRequest, BeamSearch, Trie, log_softmax_top_k
from lmdecode.reference import log_softmax_top_k as reference
from tests.beam.held_to_tries import held_to_tries
from tests.support.beam_searches import TableModel, assert_same_result, random_request, run_requests
from tests.support.cases import assert_same_bits

ITEMS = [[5, 7, 2], [5, 9, 2], [6, 2], [5, 7]]


def random_items(seed: int) -> list[list[int]]:
    choice = random.Random(seed)
    most = choice.choice((1, 3, 40, 1000))
    return [
        [choice.randint(0, most) for _ in range(choice.randint(1, choice.choice((1, 3, 7))))]
        for _ in range(choice.choice((1, 2, 30, 400)))
    ]


def assert_equal(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def flat(items: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *itertools.accumulate(map(len, items))])
    return torch.tensor([token for item in items for token in item], dtype=torch.int64), offsets


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_reference(seed: int, device: torch.device) -> None:
    items = random_items(seed)
    got = torch.ops.lmdecode.trie_build(*flat(items))
    want = lmdecode.reference.trie_build(items)
    assert_equal(got, want)
    choice = random.Random(seed)
    nodes = torch.tensor(
        [choice.randint(-2, len(want[0]) + 1) for _ in range(200)], dtype=torch.int32
    )
    tokens = torch.tensor([choice.randint(-2, 45) for _ in range(200)])
    given = (part.to(device) for part in (*got[:2], nodes, tokens))
    step = torch.ops.lmdecode.trie_step(*given)
    assert_equal([step.cpu()], [lmdecode.reference.trie_step(*want[:2], nodes, tokens)])


@pytest.mark.parametrize("seed", range(10))
def test_a_set_of_sequences(seed: int) -> None:
    items = random_items(seed)
    trie, unique = Trie(items), sorted(set(map(tuple, items)))
    assert len(trie) == len(unique)
    assert [tuple(item) for item in trie] == unique
    assert trie.longest == max(map(len, items))
    assert trie.max_token == max(map(max, items))
    for item in items:
        assert item in trie and tuple(item) in trie and torch.tensor(item) in trie
        for length in range(len(item) + 1):
            prefix = item[:length]
            following = {other[length] for other in unique if list(other[:length]) == prefix
                         and len(other) > length}  # fmt: skip
            assert trie.allowed(prefix).tolist() == sorted(following)
            assert (prefix in trie) == (tuple(prefix) in unique)
    assert [99999] not in trie
    assert trie.allowed([99999]).tolist() == [] and trie.allowed([-1]).dtype == torch.int64


def test_ways_in() -> None:
    expected = list(Trie(ITEMS))
    rows = torch.tensor([[5, 7, 2], [5, 9, 2], [6, 2, -1], [5, 7, -1]])
    for given in (
        rows, rows.to(torch.int32), rows.t().contiguous().t(), tuple(map(tuple, ITEMS)),
        (item for item in ITEMS), [torch.tensor(item) for item in ITEMS], [*ITEMS, [6, 2]],
    ):  # fmt: skip
        assert list(Trie(given)) == expected
    tokens, offsets = flat(ITEMS)
    assert list(Trie.from_flat(tokens.to(torch.int32), offsets)) == expected


def test_no_sequence() -> None:
    for trie in (Trie([]), Trie(torch.zeros(0, 4, dtype=torch.int64))):
        assert (len(trie), trie.num_nodes, trie.longest, trie.max_token) == (0, 1, 0, -1)
        assert list(trie) == [] and trie.allowed().tolist() == [] and [] not in trie


BAD: list[tuple[Any, type[Exception], str]] = [
    ([[1], []], ValueError, "sequence 1 is empty; expected at least one token"),
    ([[1], [4, -2]], ValueError, "token 1 of sequence 1 is -2; expected 0 to 2^31 - 1"),
    ([[1 << 31]], ValueError, "token 0 of sequence 0 is 2147483648"),
    ([[3], [1, 1 << 70]], ValueError, "token 1 of sequence 1 is 1180591620717411303424"),
    ([[1, 2.0]], TypeError, "token 1 of sequence 0 is of type float; expected an int"),
    ([[True]], TypeError, "token 0 of sequence 0 is of type bool"),
    ([[1], ["2"]], TypeError, "token 0 of sequence 1 is of type str"),
    ([[1], 2], TypeError, "sequence 1 is of type int; expected a sequence of ints"),
    ([[1], "12"], TypeError, "sequence 1 is of type str"),
    (7, TypeError, "sequences is of type int"),
    ("12", TypeError, "sequences is of type str"),
    (torch.rand(2, 2), TypeError, "sequences has dtype float32; expected integers"),
    (torch.ones(2, 2, dtype=torch.bool), TypeError, "sequences has dtype bool"),
    (torch.ones(2, dtype=torch.int64), ValueError, "sequences has shape [2]"),
    (torch.tensor([[1, 2], [-1, 2]]), ValueError, "sequence 1 is [-1, 2]; expected -1 behind"),
    (torch.tensor([[1, 2], [-1, -1]]), ValueError, "sequence 1 is empty"),
    (torch.tensor([[1, -3]]), ValueError, "token 1 of sequence 0 is -3"),
    ([torch.rand(2)], TypeError, "sequence 0 has dtype float32"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD, ids=[case[2] for case in BAD])
def test_bad_sequences(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(f"Trie: {message}")):
        Trie(given)


def test_bad_offsets() -> None:
    tokens = torch.tensor([1, 2, 3])
    for offsets, message in (
        ([0, 2], "offsets go from 0 to 2; expected 0 to 3"),
        ([1, 3], "offsets go from 1 to 3"),
        ([0, 9, 3], "offsets[1] is 9; expected 1 to 3"),
        ([0, 2, 1, 3], "offsets[2] is 1; expected 3 to 3"),
        ([0, 3, 3], "sequence 1 is empty"),
        ([], "offsets has shape [0]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"Trie: {message}")):
            Trie.from_flat(tokens, torch.tensor(offsets, dtype=torch.int64))
    with pytest.raises(TypeError, match="offsets is of type list"):
        Trie.from_flat(tokens, [0, 3])  # type: ignore[arg-type]


def test_bad_questions() -> None:
    trie = Trie(ITEMS)
    with pytest.raises(TypeError, match=r"prefix\[1\] is of type float"):
        trie.allowed([5, 7.0])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="sequence is of type int"):
        assert 5 in trie  # type: ignore[operator]
    with pytest.raises(ValueError, match="prompt_length is -1"):
        trie.after(-1)
    with pytest.raises(TypeError, match=r"trie.after\(prompt_length\)"):
        trie(0, torch.tensor([5]))


def test_after_a_prompt() -> None:
    allowed = Trie(ITEMS).after(2)
    for generated, following in (
        ([], [5, 6]), ([5], [7, 9]), ([5, 7], [2]), ([6, 2], [2]), ([6, 2, 0, 0], [2]),
    ):  # fmt: skip
        assert allowed(0, torch.tensor([8, 8, *generated])) == following


@pytest.mark.parametrize("seed", range(10))
def test_bitmask_after_a_prompt(seed: int) -> None:
    items = random_items(seed)
    after, choice = Trie(items).after(2), random.Random(seed)
    rows = [[1, 1, *choice.choice(items), 0, 0][: 2 + length] for length in range(4)]
    longest = max(map(len, rows))
    texts = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    words = after.bitmask(texts)
    assert words.dtype == torch.int32
    for row, ids in zip(words.tolist(), texts, strict=True):
        bits = [at for at in range(32 * len(row)) if row[at // 32] >> at % 32 & 1]
        assert bits == after(0, ids)


def test_save_and_load(tmp_path: Path) -> None:
    for seed in range(5):
        trie = Trie(random_items(seed))
        trie.save(tmp_path / "items.trie")
        loaded = Trie.load(str(tmp_path / "items.trie"))
        assert_equal(loaded.tensors, trie.tensors)
        assert list(loaded) == list(trie)
        numbers = [(t.num_nodes, len(t), t.longest, t.max_token) for t in (trie, loaded)]
        assert numbers[0] == numbers[1]
        loaded.save(tmp_path / "again.trie")
        parts = [(tmp_path / name).read_bytes() for name in ("items.trie", "again.trie")]
        assert parts[0] == parts[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.trie", "items.trie"]


def test_a_file_that_is_replaced_while_it_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "items.trie"
    Trie(ITEMS).save(path)
    loaded = Trie.load(path)
    Trie([[1]]).save(path)
    assert list(loaded) == list(Trie(ITEMS))
    assert list(Trie.load(path)) == [[1]]


def test_damaged_files(tmp_path: Path) -> None:
    """Every byte counts, and so does where the file ends."""
    path = tmp_path / "items.trie"
    Trie(ITEMS).save(path)
    good = path.read_bytes()
    unused = range(52, 64)  # zeros that fill the header up
    for place in range(len(good)):
        if place in unused:
            continue
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x41]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"Trie.load: .*items.trie .*; expected a file that"):
            Trie.load(path)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(ValueError, match=r"Trie.load: .*items.trie has \d+ bytes"):
            Trie.load(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(ValueError, match="bytes for"):
        Trie.load(path)
    path.write_bytes(good[:8] + b"\2" + good[9:])
    with pytest.raises(ValueError, match="has version 2, and this is version 1"):
        Trie.load(path)
    with pytest.raises(FileNotFoundError):
        Trie.load(tmp_path / "none.trie")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        Trie(ITEMS).save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_to_a_device(device: torch.device, tmp_path: Path) -> None:
    host = Trie(ITEMS)
    trie = host.to(device)
    assert (trie is host) == (device.type == "cpu") and trie.to(device) is trie
    assert trie.device.type == device.type and host.device.type == "cpu"
    rows = torch.tensor([[5, 7, 2], [5, 9, 3], [6, 2, 0]])
    nodes = trie.nodes_of(rows.to(device))
    assert nodes.device == trie.device and nodes.tolist() == host.nodes_of(rows).tolist()
    assert trie.goes_on(nodes).tolist() == host.goes_on(nodes.cpu()).tolist()
    assert list(trie) == list(host) and trie.allowed([5]).tolist() == [7, 9]
    trie.save(tmp_path / "items.trie")
    assert list(Trie.load(tmp_path / "items.trie").to(device)) == list(host)


def test_what_a_moved_trie_shares() -> None:
    """The meta device stands for any other."""
    host = Trie(ITEMS)
    trie = host.to("meta")
    assert trie is not host and trie.device.type == "meta" and trie.to("meta") is trie
    assert [part.shape for part in trie.tensors] == [part.shape for part in host.tensors]
    assert list(trie) == list(host) and [5, 9, 2] in trie and trie.allowed([5]).tolist() == [7, 9]
    assert (len(trie), trie.longest, trie.max_token) == (len(host), host.longest, host.max_token)
    back = trie.to(torch.device("cpu"))
    assert all(one is other for one, other in zip(back.tensors, host.tensors, strict=True))
    with pytest.raises(ValueError, match=re.escape("Trie.to: device is 'gpu'; expected a torch.")):
        host.to("gpu")
    with pytest.raises(ValueError, match=re.escape("Trie.to: device is None; expected a torch.")):
        host.to(None)  # type: ignore[arg-type]


def test_fakes_and_mixed_devices() -> None:
    trie, nodes = Trie(ITEMS), torch.zeros(4, dtype=torch.int32)
    there, fakes = trie.to("meta"), nodes.to("meta")
    tokens = torch.zeros(4, dtype=torch.int64, device="meta")
    step = there.step(fakes, tokens)
    assert (step.device.type, step.dtype, step.shape) == ("meta", torch.int32, (4,))
    found = lmdecode.log_softmax_top_k(
        torch.zeros(4, 30, device="meta"), torch.zeros(4, device="meta"), 5, num_beams=2,
        trie=there, nodes=fakes,
    )  # fmt: skip
    assert found.tokens.shape == (2, 5) and found.tokens.device.type == "meta"
    with pytest.raises(ValueError, match=r"trie_step: .* is on "):
        trie.step(nodes, tokens)


def test_bad_tensors_of_the_ops() -> None:
    tokens, begins, _ = torch.ops.lmdecode.trie_build(*flat(ITEMS))
    nodes, step = torch.zeros(2, dtype=torch.int32), torch.ops.lmdecode.trie_step
    good = (tokens, begins, nodes, torch.tensor([5, 6]))
    step(*good)
    for place, bad, message in (
        (0, tokens.long(), "trie_tokens has dtype int64"),
        (0, tokens[:0], "trie_tokens has shape [0]"),
        (0, tokens[None], "trie_tokens has shape"),
        (1, begins[1:], "child_begin has shape"),
        (1, begins.repeat_interleave(2)[::2], "child_begin has strides"),
        (2, nodes.long(), "nodes has dtype int64"),
        (2, nodes[None], "nodes has shape"),
        (3, torch.tensor([1]), "tokens has shape [1]; expected [2]"),
        (3, torch.zeros(2), "tokens has dtype float32"),
    ):
        arguments = [*good]
        arguments[place] = bad
        with pytest.raises(ValueError, match=re.escape(f"trie_step: {message}")):
            step(*arguments)


def test_arrays_that_are_no_trie() -> None:
    """Whatever they hold, nothing is read beside them, and no token comes twice too often."""
    choice, vocab = random.Random(5), 11
    for _ in range(300):
        size = choice.randint(1, 60)
        tokens = torch.tensor([choice.randint(-3, 2 * vocab) for _ in range(size)])
        any_begin = (-(1 << 31), -1, 0, 1, size - 1, size, size + 1, (1 << 31) - 1)
        begins = torch.tensor([choice.choice(any_begin) for _ in range(size + 1)])
        nodes = torch.tensor([choice.randint(-1, size) for _ in range(6)], dtype=torch.int32)
        arrays = (tokens.to(torch.int32), begins.to(torch.int32))
        torch.ops.lmdecode.trie_step(*arrays, nodes, tokens[:1].expand(6))
        found = torch.ops.lmdecode.log_softmax_top_k.trie(
            torch.randn(6, vocab), torch.zeros(6), 8, 3, None, None, None, 1.0, None, 0, None, None,
            0, None, None, None, None, 0.0, None, None, None, *arrays, nodes,
        )  # fmt: skip
        assert bool(((found[1] >= 0) & (found[1] < vocab)).all())


def test_wrong_arguments_are_named() -> None:
    trie = Trie([[5, 7], [6]])
    for call in (lambda: trie.nodes_of([[5]]), lambda: trie.nodes_of(5)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="nodes_of: sequences is of type"):
            call()
    with pytest.raises(ValueError, match="sequences"):
        trie.nodes_of(torch.tensor([5]))
    with pytest.raises(TypeError, match="step: nodes is of type list"):
        trie.step([0], torch.tensor([5]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="after: prompt_length is of type str"):
        trie.after("a")  # type: ignore[arg-type]
    assert trie.nodes_of(torch.tensor([[5], [6]], dtype=torch.int32)).tolist() == [1, 2]


def test_every_byte_of_the_header_counts(tmp_path: Path) -> None:
    Trie([[5, 7], [6]]).save(tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    for place in range(64):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"expected a file that Trie\.save wrote"):
            Trie.load(tmp_path / "damaged")


INF = float("inf")


@pytest.mark.parametrize(
    ("seed", "count", "vocabs"),
    [(1, 500, (1, 2, 5, 31, 33, 64, 200)), (2, 150, (1000, 4099)), (3, 8, (32000,))],
)
def test_searches_equal_the_reference(
    seed: int, count: int, vocabs: tuple[int, ...], device: torch.device
) -> None:
    torch.manual_seed(seed)
    for case in held_to_tries(seed, count, vocabs):
        assert_same_bits(case.to(device).call(log_softmax_top_k), case.call(reference), case)


def test_equals_a_bitmask_where_beams_are_real() -> None:
    """The scores are those of the same tokens allowed by a bitmask, bit for bit."""
    torch.manual_seed(0)
    x, scores = torch.randn(6, 300) * 3, -torch.rand(6)
    trie = Trie([[token, token + 1] for token in range(0, 299, 3)] + [[7], [298, 4], [298, 9]])
    nodes = trie.step(torch.zeros(6, dtype=torch.int32), torch.tensor([0, 3, 298, 6, 9, 12]))
    nodes[0] = 0
    mask = torch.zeros(6, 10, dtype=torch.int32)
    for row, node in enumerate(nodes.tolist()):
        begin, end = trie.tensors[1][node : node + 2].tolist()
        for token in trie.tensors[0][begin:end].tolist():
            mask[row, token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)
    for width, count in ((1, 2), (3, 7), (6, 200)):
        held = log_softmax_top_k(x, scores, count, num_beams=width, trie=trie, nodes=nodes)
        masked = log_softmax_top_k(x, scores, count, num_beams=width, token_bitmask=mask)
        assert_same_bits(held, masked)


def test_where_nothing_goes_on() -> None:
    trie, x = Trie([[1, 2]]), torch.zeros(4, 5)
    leaf = int(trie.nodes_of(torch.tensor([[1, 2]]))[0])
    nodes = torch.tensor([leaf, -1, 0, leaf], dtype=torch.int32)
    found = log_softmax_top_k(x, torch.zeros(4), 3, num_beams=2, trie=trie, nodes=nodes)
    assert found.status.tolist() == [0, 0]
    assert found.scores[0].tolist() == [-INF] * 3
    assert (found.scores[1] > -INF).tolist() == [True, False, False]
    assert (found.tokens[1, 0], found.beams[1, 0]) == (1, 0)
    # A failure is one all the same, where the row is looked at.
    x[2, 3] = float("nan")
    assert log_softmax_top_k(
        x, torch.zeros(4), 3, num_beams=2, trie=trie, nodes=nodes
    ).status.tolist() == [0, 1]
    x[2] = -INF
    assert log_softmax_top_k(
        x, torch.zeros(4), 3, num_beams=2, trie=trie, nodes=nodes
    ).status.tolist() == [0, 2]


def test_bad_arguments() -> None:
    trie, x, scores = Trie([[7]]), torch.zeros(2, 9), torch.zeros(2)
    nodes = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match="nodes is of type NoneType; expected a tensor beside trie"):
        log_softmax_top_k(x, scores, 1, num_beams=1, trie=trie)
    with pytest.raises(TypeError, match="trie is of type NoneType; expected a Trie beside nodes"):
        log_softmax_top_k(x, scores, 1, num_beams=1, nodes=nodes)
    with pytest.raises(TypeError, match="trie is of type list"):
        log_softmax_top_k(x, scores, 1, num_beams=1, trie=[[7]], nodes=nodes)  # type: ignore
    with pytest.raises(ValueError, match=r"nodes has shape \[1\]; expected \[2\]"):
        log_softmax_top_k(x, scores, 1, num_beams=1, trie=trie, nodes=nodes[:1])
    with pytest.raises(ValueError, match=r"trie is on meta; .* logits, cpu: trie\.to\('cpu'\)"):
        log_softmax_top_k(x, scores, 1, num_beams=1, trie=trie.to("meta"), nodes=nodes)
    with pytest.raises(ValueError, match="trie has the token 7; expected tokens below 7"):
        log_softmax_top_k(x[:, :7], scores, 1, num_beams=1, trie=trie, nodes=nodes)


VOCAB, END = 23, 2


def catalogue(seed: int, count: int = 60) -> Trie:
    choice = random.Random(seed)
    tokens = [token for token in range(VOCAB) if token != END]
    return Trie(
        [*(choice.choice(tokens) for _ in range(choice.randint(1, 4))), END] for _ in range(count)
    )


def held_request(choice: random.Random, tries: list[Trie]) -> BeamRequest:
    request = random_request(choice, VOCAB, eos_token_id=[END], dialect="generate")
    if choice.random() < 0.2:
        request = replace(request, dialect="fairseq", early_stopping=False)
    trie = choice.choice((*tries, None))
    return replace(request, trie=trie, max_new_tokens=6, forced_bos_token_id=None,
                   forced_eos_token_id=None)  # fmt: skip


def test_every_result_is_in_the_catalogue() -> None:
    model, tries, counted = TableModel(VOCAB, seed=3), [catalogue(1), catalogue(2, 3)], 0
    for seed in range(60):
        request = held_request(random.Random(seed), tries)
        if request.trie is None:
            continue
        (result,) = run_requests(BeamSearch(), model, [(0, request)]).values()
        assert result.status == 0
        found = [result.new_tokens(rank) for rank in range(len(result.sequences))]
        assert all(item in request.trie for item in found), found
        if request.num_beam_groups == 1:
            assert len({tuple(item) for item in found}) == len(found)
        counted += len(found)
    assert counted > 60


def test_a_catalogue_smaller_than_the_search() -> None:
    """Every item is found once, and then the search ends."""
    model, trie = TableModel(VOCAB, seed=3), Trie([[5, END], [5, 6, END], [9, 4, 4, END]])
    for stop in (False, True, "never"):
        request = BeamRequest(
            [1], max_new_tokens=20, num_beams=8, num_return_sequences=8, eos_token_id=END,
            trie=trie, early_stopping=stop,
        )  # fmt: skip
        (result,) = run_requests(BeamSearch(), model, [(0, request)]).values()
        found = [result.new_tokens(rank) for rank in range(len(result.sequences))]
        assert sorted(found) == list(trie)
        assert result.status == 0 and result.num_steps <= 6


def test_no_catalogue_no_result() -> None:
    request = BeamRequest([1], max_new_tokens=3, num_beams=2, eos_token_id=END, trie=Trie([]))
    (result,) = run_requests(BeamSearch(), TableModel(VOCAB, seed=0), [(0, request)]).values()
    assert (len(result.sequences), result.status, result.num_steps) == (0, 0, 1)


@pytest.mark.parametrize("seed", range(12))
def test_a_request_alone_and_in_any_batch(seed: int) -> None:
    """Requests with tries, the same or others, and without any, in one batch."""
    choice, model = random.Random(seed), TableModel(VOCAB, seed=seed)
    tries = [catalogue(seed), catalogue(seed + 100, 4)]
    arrivals = [(choice.randrange(6), held_request(choice, tries)) for _ in range(7)]
    together = run_requests(BeamSearch(slots=1, num_beams=1), model, arrivals)
    for number, (_, request) in enumerate(arrivals):
        (alone,) = run_requests(BeamSearch(), model, [(0, request)]).values()
        assert_same_result(together[number], alone, number)


def test_what_a_request_refuses() -> None:
    trie = catalogue(0)
    with pytest.raises(TypeError, match="BeamRequest: trie is of type list; expected a Trie"):
        BeamRequest([1], max_new_tokens=1, trie=[[1]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'trie is .*; expected None with dialect="scorer"'):
        BeamRequest([1], max_new_tokens=1, trie=trie, dialect="scorer")
    engine = BeamSearch()
    engine.insert(BeamRequest([1], max_new_tokens=1, trie=Trie([[30]])))
    with pytest.raises(ValueError, match=r"step: trie has the token 30; expected tokens"):
        engine.step(torch.zeros(1, VOCAB))
    assert engine.running == (0,)
    on_meta = BeamSearch(device="meta")
    with pytest.raises(ValueError, match=r"BeamSearch.insert: trie is on cpu; expected .* meta"):
        on_meta.insert(BeamRequest([1], max_new_tokens=1, trie=trie))
    assert on_meta.insert(BeamRequest([1], max_new_tokens=1, trie=trie.to("meta"))) == 0
    assert lmdecode.Trie is Trie
