"""``Trie``: what it holds, its file, and what it refuses; its ops against the reference."""

import itertools
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode.reference
from lmdecode import Trie

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
