"""decoder() and decoding() of FasterTransformer v2.0 against plain torch by their contract."""

import itertools
import re
from typing import Any

import pytest
import torch

from lmdecode.compat.faster_transformer import decoder, decoding, gather_tree
from lmdecode.reference.decoder import faster_transformer_decoder, faster_transformer_decoding


def layer_weights(size: int, memory_size: int, scale: float = 0.3) -> list[torch.Tensor]:
    def norm() -> list[torch.Tensor]:
        return [torch.randn(size) * 0.1, 1.0 + torch.randn(size) * 0.1]

    def linear(inner: int, outer: int) -> list[torch.Tensor]:
        return [torch.randn(inner, outer) * scale, torch.randn(outer) * 0.1]

    own = norm() + linear(size, size) * 1
    for _ in range(3):
        own += linear(size, size)
    cross = norm() + linear(size, size) + linear(memory_size, size) + linear(memory_size, size)
    cross += linear(size, size)
    ffn = norm() + linear(size, 4 * size) + linear(4 * size, size)
    return own + cross + ffn


def decoding_case(
    batch: int,
    beams: int,
    heads: int,
    head: int,
    *,
    vocab: int = 50,
    steps: int = 12,
    layers: int = 2,
    memory_size: int = 20,
    source: int = 7,
    seed: int = 0,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    size = heads * head
    memory = torch.randn(batch, source, memory_size).repeat_interleave(beams, dim=0)
    lengths = torch.randint(1, source + 1, (batch,), dtype=torch.int32)
    bias = torch.randn(vocab)
    bias[3] += 2.0
    return dict(
        memory_tensor=memory,
        memory_sequence_length=lengths.repeat_interleave(beams),
        weights=[layer_weights(size, memory_size) for _ in range(layers)],
        embedding_table=torch.randn(vocab, size),
        decoding_beta=torch.randn(size) * 0.1,
        decoding_gamma=1 + torch.randn(size) * 0.1,
        embedding_kernel=torch.randn(size, vocab) * 0.5,
        embedding_bias=bias,
        batch_size=batch,
        beam_width=beams,
        max_seq_len=steps,
        head_num=heads,
        size_per_head=head,
        start_id=1,
        end_id=3,
    )


def ours(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return decoding(
        **case,
        num_layer=len(case["weights"]),
        memory_hidden_dim=case["memory_tensor"].shape[2],
        vocab_size=len(case["embedding_table"]),
    )


def doubled(value: Any) -> Any:
    """Return the case, or a part of it, in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list):
        return [doubled(part) for part in value]
    if isinstance(value, dict):
        return {name: doubled(part) for name, part in value.items()}
    return value


def decided_result(case: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """Return the result in float64; None where two beams are nearer than float32 can tell."""
    case = doubled(case)
    expected = faster_transformer_decoding(**case)
    for _ in range(2):
        noise = torch.randn_like(case["embedding_kernel"]) * 3e-6
        other = case | {"embedding_kernel": case["embedding_kernel"] + noise}
        found = faster_transformer_decoding(**other)
        if any(a.tolist() != b.tolist() for a, b in zip(found, expected, strict=True)):
            return None
    return expected


@pytest.mark.parametrize(("heads", "head"), [(2, 8), (3, 10), (1, 64), (12, 4), (5, 7), (1, 129)])
def test_decoder_step_by_step(heads: int, head: int) -> None:
    torch.manual_seed(1)
    rows, source, memory_size, size = 5, 6, 14, heads * head
    weights = layer_weights(size, memory_size, min(0.2, size**-0.5))
    memory = torch.randn(rows, source, memory_size)
    lengths = torch.tensor([6, 1, 3, 6, 0])
    expected = [torch.zeros(2, 0, rows, size), torch.zeros(2, rows, source, size)]
    got = [part.clone() for part in expected]
    for _ in range(4):
        x = torch.randn(rows, 1, size)
        results = []
        for function, caches in ((faster_transformer_decoder, expected), (decoder, got)):
            grown = torch.cat((caches[0], torch.zeros(2, 1, rows, size)), dim=1)
            out, caches[0], caches[1] = function(
                x, memory, lengths, weights, grown, caches[1],
                head_num=heads, size_per_head=head,
            )  # fmt: skip
            results.append(out)
        torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "beams", "heads", "head"),
    [(1, 1, 2, 8), (3, 4, 3, 10), (2, 7, 1, 16), (1, 64, 2, 8), (3, 64, 3, 5), (4, 2, 16, 4),
     (2, 3, 5, 7), (1, 5, 1, 129), (2, 4, 8, 64)],
)  # fmt: skip
def test_decoding(batch: int, beams: int, heads: int, head: int) -> None:
    decided = 0
    for seed in range(20):
        case = decoding_case(batch, beams, heads, head, seed=seed)
        expected = decided_result(case)
        if expected is None:
            continue
        decided += 1
        names = ("output_ids", "parent_ids", "sequence_length")
        for name, got, wanted in zip(names, ours(case), expected, strict=True):
            assert got.dtype == torch.int32
            assert got.tolist() == wanted.tolist(), name
        if decided == 3:
            return
    pytest.fail(f"{decided} of 20 cases are decided, expected 3")


def test_beams_that_end_go_on_with_their_score() -> None:
    """Some beams end long before others, which overtake them or do not."""
    case = decoding_case(3, 4, 2, 8, steps=20, seed=4)
    ids, parents, lengths = ours(case)
    assert (ids == 3).any(dim=0).any() and len(set(lengths.tolist())) > 1
    assert parents.min() >= 0 and parents.max() < 12


def test_memories_of_their_own() -> None:
    """Where the rows of a request differ each is read by itself."""
    case = decoding_case(2, 3, 2, 8)
    case["memory_tensor"] = torch.randn_like(case["memory_tensor"])
    for got, expected in zip(ours(case), faster_transformer_decoding(**case), strict=True):
        assert got.tolist() == expected.tolist()


@pytest.mark.slow
def test_a_long_sequence() -> None:
    case = decoding_case(1, 2, 1, 4, vocab=12, steps=4096, layers=1, memory_size=4)
    case["embedding_bias"][3] = -1000.0  # never ends
    ids, parents, lengths = ours(case)
    assert ids.shape == (4096, 2) and lengths.tolist() == [4096, 4096]
    expected_ids, expected_parents, _ = faster_transformer_decoding(**case)
    assert ids.tolist() == expected_ids.tolist()
    assert parents.tolist() == expected_parents.tolist()


def test_gather_tree_spells_the_sequences() -> None:
    case = decoding_case(3, 4, 2, 8, steps=20, seed=4)
    ids, parents, lengths = ours(case)
    shape = (20, 3, 4)
    sequences = gather_tree(
        ids.view(shape), parents.view(shape) % 4, lengths.view(3, 4).amax(1), case["end_id"]
    )
    for request, beam in itertools.product(range(3), range(4)):
        row, spelled = 4 * request + beam, []
        for step in reversed(range(20)):
            spelled.append(int(ids[step, row]))
            row = int(parents[step, row])
        spelled.reverse()
        assert sequences[:, request, beam].tolist() == spelled
        length = int(lengths[4 * request + beam])
        assert (3 in spelled[: length - 1]) is False and set(spelled[length:]) <= {3}


def test_a_request_alone_is_that_of_any_batch() -> None:
    case = decoding_case(4, 3, 2, 8, seed=7)
    ids, parents, lengths = ours(case)
    for request in range(4):
        rows = slice(3 * request, 3 * request + 3)
        alone = dict(
            case,
            batch_size=1,
            memory_tensor=case["memory_tensor"][rows],
            memory_sequence_length=case["memory_sequence_length"][rows],
        )
        one_ids, one_parents, one_lengths = ours(alone)
        assert one_ids.equal(ids[:, rows]) and one_lengths.equal(lengths[rows])
        assert (one_parents + 3 * request).equal(parents[:, rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 3}, "memory_tensor has shape"),
        ({"head_num": 3}, "has shape"),
        ({"end_id": 50}, "end_id is 50"),
        ({"start_id": -1}, "start_id is -1"),
        ({"weights": []}, "weights has 0 layers"),
        ({"memory_sequence_length": torch.full((8,), 8)}, "memory_sequence_length is"),
        ({"memory_sequence_length": torch.ones(8)}, "expected integers"),
        ({"embedding_bias": torch.zeros(49)}, "embedding_bias has shape"),
        ({"embedding_table": torch.zeros(50, 16).double()}, "embedding_table has dtype float64"),
        ({"embedding_bias": torch.full((50,), torch.nan)}, "NaN in its logits"),
    ],
    ids=str,
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    case = decoding_case(2, 4, 2, 8) | change
    with pytest.raises(ValueError, match=message):
        decoding(**case, num_layer=2, memory_hidden_dim=20, vocab_size=50)


def decoder_case() -> dict[str, Any]:
    torch.manual_seed(2)
    return dict(
        from_tensor=torch.randn(3, 1, 16),
        memory_tensor=torch.randn(3, 5, 20),
        memory_sequence_length=torch.tensor([5, 1, 2]),
        weights=layer_weights(16, 20),
        old_self_cache=torch.randn(2, 2, 3, 16),
        old_mem_cache=torch.randn(2, 3, 5, 16),
        head_num=2,
        size_per_head=8,
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"from_tensor": torch.zeros(3, 16)}, ValueError, "from_tensor has shape [3, 16]"),
        ({"from_tensor": torch.zeros(3, 1, 15)}, ValueError, "from_tensor has shape"),
        ({"from_tensor": [[0.0]]}, TypeError, "from_tensor is of type list"),
        ({"memory_tensor": torch.zeros(2, 5, 20)}, ValueError, "memory_tensor has shape"),
        ({"memory_tensor": torch.zeros(3, 5, 21)}, ValueError, "cross_k_kernel has shape"),
        ({"memory_sequence_length": torch.tensor([5, 6, 0])}, ValueError, "expected 0 to 5"),
        ({"memory_sequence_length": torch.ones(3)}, ValueError, "expected integers"),
        ({"old_self_cache": torch.zeros(2, 0, 3, 16)}, ValueError, "old_self_cache has 0 steps"),
        ({"old_self_cache": torch.zeros(2, 2, 4, 16)}, ValueError, "old_self_cache has shape"),
        ({"old_mem_cache": torch.zeros(2, 3, 4, 16)}, ValueError, "old_mem_cache has shape"),
        ({"old_mem_cache": torch.zeros(2, 3, 5, 16).half()}, ValueError, "has dtype float16"),
        ({"head_num": 2.0}, TypeError, "head_num is of type float"),
        ({"size_per_head": 0}, ValueError, "size_per_head is 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_bad_input_of_a_layer(change: dict[str, Any], error: Any, message: str) -> None:
    case = decoder_case() | change
    with pytest.raises(error, match=f"^decoder: .*{re.escape(message)}"):
        decoder(**case)


def test_a_layer_writes_to_none_of_its_arguments() -> None:
    case = decoder_case()
    before = {n: t.clone() for n, t in case.items() if isinstance(t, torch.Tensor)}
    decoder(**case)
    assert all(case[name].equal(tensor) for name, tensor in before.items())


def test_a_layer_needs_26_tensors() -> None:
    case = decoding_case(1, 1, 2, 8, layers=1)
    case["weights"] = [case["weights"][0][:-1]]
    with pytest.raises(ValueError, match="weights has 25 tensors; expected 26"):
        ours(case)
