"""Beams held to a ``Trie``: ``log_softmax_top_k`` against the reference, and ``BeamSearch``."""

import random
from dataclasses import replace

import pytest
import torch

import lmdecode
from lmdecode import BeamRequest, BeamSearch, Trie, log_softmax_top_k
from lmdecode.reference import log_softmax_top_k as reference
from tests.beam.held_to_tries import held_to_tries
from tests.support.beam_searches import TableModel, assert_same_result, random_request, run_requests
from tests.support.cases import assert_same_bits

INF = float("inf")


@pytest.mark.parametrize(
    ("seed", "count", "vocabs"),
    [(1, 500, (1, 2, 5, 31, 33, 64, 200)), (2, 150, (1000, 4099)), (3, 8, (32000,))],
)
def test_equals_the_reference(
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
