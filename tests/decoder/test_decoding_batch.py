"""DecodingBatch: requests that come and go, against the same requests alone and the reference."""

import itertools
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import BeamRequest, BeamResult, BeamSearch
from lmdecode.decoder import searches
from lmdecode.models.configs import DecoderConfig
from lmdecode.models.weights import DecoderWeights
from lmdecode.reference.decoder import decoder_logits
from tests.decoder.random_decoder import KINDS, random_decoder

SIZES: dict[str, int] = dict(max_requests=3, num_beams=5, capacity=24, source=9)
REQUESTS: list[dict[str, Any]] = [
    dict(prompt_ids=[1], num_beams=4, max_new_tokens=12, eos_token_id=2),
    dict(prompt_ids=[1, 5, 7], num_beams=2, max_new_tokens=8, eos_token_id=[2, 3]),
    dict(prompt_ids=[4], num_beams=1, max_new_tokens=10, eos_token_id=2, early_stopping=True),
    dict(
        prompt_ids=[1], num_beams=5, max_new_tokens=15, eos_token_id=2, num_return_sequences=3,
        repetition_penalty=1.4, no_repeat_ngram_size=2, min_new_tokens=4,
    ),
    dict(
        prompt_ids=[1], num_beams=3, max_new_tokens=6, eos_token_id=2, forced_bos_token_id=8,
        forced_eos_token_id=2, suppress_tokens=[9, 10, 11], length_penalty=0.3,
    ),
]  # fmt: skip


def memories(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 18, generator=generator) for length in (9, 4, 1, 7, 0)]


def by_the_reference(
    config: DecoderConfig, weights: DecoderWeights, request: BeamRequest, memory: torch.Tensor
) -> BeamResult:
    """Run ``BeamSearch`` on the reference's logits."""
    engine = BeamSearch()
    engine.insert(request)
    while engine.running:
        ids = engine.input_ids().input_ids
        rows = len(ids)
        logits = decoder_logits(
            config, weights, ids, memory.expand(rows, *memory.shape),
            torch.full((rows,), len(memory)),
        )  # fmt: skip
        engine.step(logits[:, -1])
    return engine.pop_finished()[0]


def same(one: BeamResult, other: BeamResult) -> None:
    assert one.sequences.equal(other.sequences) and one.lengths.equal(other.lengths)
    assert one.scores.equal(other.scores) and one.log_probs.equal(other.log_probs)
    assert one.beam_indices.equal(other.beam_indices) and one.status == other.status


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_results_are_those_of_the_reference(kind: str) -> None:
    config, weights = random_decoder(kind)
    batch = lmdecode.Decoding(config, weights).batch(**SIZES)
    for arguments, memory in zip(REQUESTS, memories(), strict=True):
        request = BeamRequest(**arguments)
        batch.add(request, memory)
        (result,) = batch.run()
        expected = by_the_reference(config, weights, request, memory)
        assert result.sequences.tolist() == expected.sequences.tolist()
        assert result.lengths.tolist() == expected.lengths.tolist()
        assert result.beam_indices.tolist() == expected.beam_indices.tolist()
        torch.testing.assert_close(result.scores, expected.scores, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(result.log_probs, expected.log_probs, atol=1e-4, rtol=1e-4)
        assert result.num_steps == expected.num_steps and result.status == 0


CAPABILITY_SCRIPT = """
import sys
sys.path.insert(0, "../..")
from tests.decoder.random_decoder import KINDS
from tests.decoder.test_decoding_batch import test_results_are_those_of_the_reference
for kind in KINDS:
    test_results_are_those_of_the_reference(kind)
"""


@pytest.mark.slow
def test_cpu_capability(run_at_capability: Callable[[str], list[str]]) -> None:
    assert run_at_capability(CAPABILITY_SCRIPT) == []


@pytest.mark.parametrize("kind", ["post_norm", "rms"])
def test_a_request_alone_is_the_same_in_any_company(kind: str) -> None:
    """Bitwise, whenever it comes, and for any number of threads."""
    decoding = lmdecode.Decoding(*random_decoder(kind))
    pairs = list(zip(REQUESTS, memories(), strict=True))
    alone = []
    for arguments, memory in pairs:
        batch = decoding.batch(max_requests=1, num_beams=5, capacity=24, source=9)
        batch.add(BeamRequest(**arguments), memory)
        alone += batch.run()
    threads = torch.get_num_threads()
    try:
        for order, count in ((0, 1), (1, 2), (2, 1)):
            torch.set_num_threads(count)
            batch = decoding.batch(**SIZES)
            waiting = [*pairs[order:], *pairs[:order]]
            results: dict[Any, BeamResult] = {}
            for step in itertools.count():
                while waiting and batch.free_places and (step % 2 == 0 or not batch.running):
                    arguments, memory = waiting.pop(0)
                    batch.add(BeamRequest(**arguments, request_id=str(arguments)), memory)
                ended = batch.step(1 + step % 3)
                finished = batch.pop_finished()
                assert tuple(result.request_id for result in finished) == ended
                results |= {result.request_id: result for result in finished}
                if not waiting and not batch.running:
                    break
            for (arguments, _), expected in zip(pairs, alone, strict=True):
                same(results[str(arguments)], expected)
    finally:
        torch.set_num_threads(threads)


def test_requests_held_to_tries() -> None:
    """Each to its own or to none, in one batch: as on the reference's logits."""
    config, weights = random_decoder("post_norm")
    choice, vocab = random.Random(0), config.vocab_size
    tries = [
        lmdecode.Trie(
            [*(choice.randrange(3, vocab) for _ in range(choice.randint(1, 4))), 2]
            for _ in range(count)
        )
        for count in (90, 3)
    ]
    batch = lmdecode.Decoding(config, weights).batch(**SIZES)
    pairs = list(zip([0, 1, None, 0, 1], memories(), strict=True))
    requests = [
        BeamRequest([1, 9], max_new_tokens=7, num_beams=5, num_return_sequences=5, eos_token_id=2,
                    request_id=number, trie=None if trie is None else tries[trie])
        for number, (trie, _) in enumerate(pairs)
    ]  # fmt: skip
    waiting = list(zip(requests, (memory for _, memory in pairs), strict=True))
    results: dict[Any, BeamResult] = {}
    while waiting or batch.running:
        if waiting and batch.free_places:
            batch.add(*waiting.pop(0))
        batch.step(2)
        results |= {result.request_id: result for result in batch.pop_finished()}
    for request, (_, memory) in zip(requests, pairs, strict=True):
        result = results[request.request_id]
        expected = by_the_reference(config, weights, request, memory)
        assert result.sequences.tolist() == expected.sequences.tolist()
        assert result.beam_indices.tolist() == expected.beam_indices.tolist()
        torch.testing.assert_close(result.scores, expected.scores, atol=1e-4, rtol=1e-4)
        assert result.status == 0
        if request.trie is not None:
            found = [result.new_tokens(rank) for rank in range(len(result.sequences))]
            assert all(item in request.trie for item in found)
            assert len(found) == min(5, len(request.trie))
    with pytest.raises(ValueError, match=rf"add: trie has the token {vocab}; expected tokens"):
        batch.add(BeamRequest([1], max_new_tokens=1, trie=lmdecode.Trie([[vocab]])), memories()[0])


def test_keys_and_values_stay_where_they_are() -> None:
    """Steps write one position of each row, and no byte of the memory's."""
    batch = lmdecode.Decoding(*random_decoder("post_norm")).batch(**SIZES)
    batch.add(BeamRequest(**REQUESTS[0]), memories()[0])
    caches = batch._slots.searches.caches
    for position in range(4):
        now = [cache.view(torch.int32) for cache in caches[:4]]  # bits: some were never written
        before = [cache.clone() for cache in now]
        batch.step()
        for old, new in zip(before[2:], now[2:], strict=True):
            assert old.equal(new)
        for old, new in zip(before[:2], now[:2], strict=True):
            changed = (old != new).any(dim=-1).nonzero()  # layer, row, head, position
            assert set(changed[:, 3].tolist()) <= {position}
            assert set(changed[:, 1].tolist()) <= set(range(4))


def test_nan_ends_one_request() -> None:
    batch = lmdecode.Decoding(*random_decoder("post_norm")).batch(**SIZES)
    bad = torch.full((3, 18), torch.nan)
    batch.add(BeamRequest(**REQUESTS[0], request_id="good"), memories()[0])
    batch.add(BeamRequest(**REQUESTS[1], request_id="bad"), bad)
    results = {result.request_id: result for result in batch.run()}
    assert results["bad"].status == 1 and results["good"].status == 0
    assert results["bad"].num_steps == 1
    assert len(results["good"].sequences) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_beams": 6}, "num_beams of the request: 6; expected at most 5"),
        ({"max_new_tokens": 24}, "the prompt and max_new_tokens of the request: 25"),
        ({"eos_token_id": [1, 2, 3, 4, 5]}, "eos_token_id of the request: 5"),
        ({"suppress_tokens": list(range(65))}, "suppress_tokens of the request: 65"),
        ({"num_beam_groups": 2, "num_beams": 4}, "num_beam_groups is 2"),
        ({"logit_bias": {1: 2.0}}, "logit_bias is"),
        ({"dialect": "fairseq"}, "dialect is 'fairseq'"),
        ({"prompt_ids": [40]}, "prompt_ids is"),
        ({"request_id": "taken"}, "request_id 'taken' is in use"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    batch = lmdecode.Decoding(*random_decoder("post_norm")).batch(**SIZES)
    batch.add(BeamRequest(**REQUESTS[0], request_id="taken"), memories()[0])
    with pytest.raises(ValueError, match=message):
        batch.add(BeamRequest(**{**REQUESTS[0], **change}), memories()[0])
    assert batch.running == ("taken",)


@pytest.mark.parametrize("memory", [torch.zeros(10, 18), torch.zeros(3, 17), torch.zeros(18)])
def test_memories_that_do_not_fit(memory: torch.Tensor) -> None:
    batch = lmdecode.Decoding(*random_decoder("post_norm")).batch(**SIZES)
    with pytest.raises(ValueError, match="memory"):
        batch.add(BeamRequest(**REQUESTS[0]), memory)


def test_a_full_batch_and_wrong_sizes() -> None:
    decoding = lmdecode.Decoding(*random_decoder("post_norm"))
    batch = decoding.batch(**{**SIZES, "max_requests": 1})
    batch.add(BeamRequest(**REQUESTS[0]), memories()[0])
    with pytest.raises(ValueError, match="expected a free place"):
        batch.add(BeamRequest(**REQUESTS[1]), memories()[1])
    for name in SIZES:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            decoding.batch(**{**SIZES, name: 0})
    with pytest.raises(ValueError, match="capacity is 90; expected at most 89"):
        decoding.batch(**{**SIZES, "capacity": 90})
    with pytest.raises(TypeError, match="expected a BeamRequest"):
        batch.add("request", memories()[0])  # type: ignore[arg-type]


def test_longer_lists_of_tokens_where_the_batch_is_made_for_them() -> None:
    decoding = lmdecode.Decoding(*random_decoder("post_norm"))
    request = BeamRequest(
        [1], num_beams=2, max_new_tokens=6, eos_token_id=range(2, 9), suppress_tokens=range(9, 30)
    )
    sizes = SIZES | dict(max_suppressed=20)
    with pytest.raises(ValueError, match="eos_token_id of the request: 7; expected at most 4"):
        decoding.batch(**sizes).add(request, memories()[0])
    sizes |= dict(max_end_tokens=7)
    with pytest.raises(ValueError, match="suppress_tokens of the request: 21; expected at most 20"):
        decoding.batch(**sizes).add(request, memories()[0])
    batch = decoding.batch(**sizes | dict(max_suppressed=21))
    batch.add(request, memories()[0])
    (result,) = batch.run()
    assert not set(range(9, 30)) & set(result.sequences.flatten().tolist())


def test_the_last_token_needs_no_distance() -> None:
    """It is chosen and not read, as with positions."""
    config, weights = random_decoder("rms")
    weights = weights._replace(relative_bias=weights.relative_bias[:, :7])
    sizes = SIZES | dict(capacity=8)
    batch = lmdecode.Decoding(config, weights).batch(**sizes)
    batch.add(BeamRequest([1], num_beams=2, max_new_tokens=7, eos_token_id=[]), memories()[0])
    assert batch.run()[0].sequences.shape == (1, 8)
    with pytest.raises(ValueError, match=r"capacity is 9; expected at most 8: .* 7 distances"):
        lmdecode.Decoding(config, weights).batch(**sizes | dict(capacity=9))


def test_cancel() -> None:
    """The others go on as if it had never been there, and its place and its id are free."""
    decoding = lmdecode.Decoding(*random_decoder("post_norm"))
    pairs = list(zip(REQUESTS, memories(), strict=True))
    alone = []
    for arguments, memory in pairs:
        batch = decoding.batch(**{**SIZES, "max_requests": 1})
        batch.add(BeamRequest(**arguments), memory)
        alone += batch.run()
    batch = decoding.batch(**SIZES)
    for number in (0, 3, 4):
        batch.add(BeamRequest(**pairs[number][0], request_id=number), pairs[number][1])
    batch.step(2)
    batch.cancel(3)
    assert batch.running == (0, 4) and batch.free_places == 1
    batch.add(BeamRequest(**pairs[1][0], request_id=3), pairs[1][1])
    results = {result.request_id: result for result in batch.run()}
    assert results.keys() == {0, 3, 4} and not batch.running
    for request_id, number in ((0, 0), (3, 1), (4, 4)):
        same(results[request_id], alone[number])


@pytest.mark.parametrize("first_part", [1, 2])
def test_a_signal_is_handled_between_steps(
    monkeypatch: pytest.MonkeyPatch, first_part: int
) -> None:
    """Searches of a model with large weights are interrupted, and go on where they were."""
    decoding = lmdecode.Decoding(*random_decoder("post_norm"))
    pairs = list(zip(REQUESTS, memories(), strict=True))[:3]

    def new_batch() -> Any:
        batch = decoding.batch(**SIZES)
        for number, (arguments, memory) in enumerate(pairs):
            batch.add(BeamRequest(**arguments, request_id=number), memory)
        return batch

    expected = sorted(new_batch().run(), key=lambda result: result.request_id)
    of_model = [tensor.nbytes for tensor in decoding.decoder.of_model]
    monkeypatch.setattr(searches, "_BYTES_OF_FIRST_PART", first_part * sum(of_model))
    batch, calls, run = new_batch(), [], searches.DecodingSearches._run

    def interrupted(self: Any, options: list[int], logits: Any) -> int:
        steps = run(self, options, logits)
        calls.append(options[0])
        if len(calls) in (1, 3):
            signal.raise_signal(signal.SIGINT)  # as if it had come meanwhile
        return steps

    monkeypatch.setattr(searches.DecodingSearches, "_run", interrupted)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                batch.run()
    finally:
        signal.signal(signal.SIGINT, former)
    results = sorted(batch.run(), key=lambda result: result.request_id)
    assert calls[0] == first_part and len(calls) > 3
    for result, other in zip(results, expected, strict=True):
        assert result.request_id == other.request_id and result.num_steps == other.num_steps
        same(result, other)


def test_cancel_what_does_not_run() -> None:
    batch = lmdecode.Decoding(*random_decoder("post_norm")).batch(**SIZES)
    batch.add(BeamRequest(**REQUESTS[0], request_id="a"), memories()[0])
    with pytest.raises(ValueError, match=r"cancel: request_id is 'b'; expected one .*: \['a'\]"):
        batch.cancel("b")
    batch.run()
    with pytest.raises(ValueError, match=r"cancel: request_id is 'a'; expected one .*: \[\]"):
        batch.cancel("a")
    batch.add(BeamRequest(**REQUESTS[0], request_id="b"), memories()[0])
    batch.cancel("b")
    assert batch.run() == [] and batch.free_places == SIZES["max_requests"]
