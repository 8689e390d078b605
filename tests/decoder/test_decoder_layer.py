"""DecoderLayer, a step at a time, against whole sequences in plain torch."""

from dataclasses import replace

import pytest
import torch

from lmdecode import DecoderLayer
from lmdecode.reference.decoder import decoder_layer
from tests.decoder.random_decoder import KINDS, random_decoder


def inputs(rows: int, steps: int, requests: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    memory = torch.randn(requests, 7, 18, generator=generator)
    lengths = torch.randint(0, 8, (requests,), generator=generator)
    return torch.randn(rows, steps, 22, generator=generator), memory, lengths


@pytest.mark.parametrize("head", [1, 10, 16, 33])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_against_the_reference(kind: str, head: int) -> None:
    config, weights = random_decoder(kind, head=head)
    x, memory, lengths = inputs(6, 20, 2)
    bias = weights.relative_bias
    layer = DecoderLayer(config, weights.layers[0], bias)
    caches = layer.new_caches(memory, lengths, rows=6, capacity=20)
    spread = None
    if bias is not None:
        places = torch.arange(20)
        spread = bias[:, (places[:, None] - places).clamp(min=0)]
    expected = decoder_layer(
        config, weights.layers[0], x, memory.repeat_interleave(3, dim=0),
        lengths.repeat_interleave(3), spread,
    )  # fmt: skip
    for step in range(20):
        got = layer(x[:, step], caches, torch.full((6,), step))
        torch.testing.assert_close(got, expected[:, step], atol=2e-5, rtol=2e-5)


def test_the_table_says_where_positions_are() -> None:
    """A row that goes on from another one's past, of which nothing was copied."""
    config, weights = random_decoder("post_norm")
    x, memory, lengths = inputs(2, 5, 1)
    lengths[:] = 7
    layer = DecoderLayer(config, weights.layers[0])
    caches = layer.new_caches(memory, lengths, rows=2, capacity=5)
    for step in range(4):
        layer(x[:, step], caches, torch.full((2,), step))
    caches.table[1, :4] = 0  # row 1 now continues row 0
    got = layer(x[:, 4], caches, torch.tensor([4, 4]))
    past = torch.cat((x[:1, :4].expand(2, 4, 22), x[:, 4:]), dim=1)
    expected = decoder_layer(
        config, weights.layers[0], past, memory.expand(2, 7, 18), lengths.expand(2)
    )
    torch.testing.assert_close(got, expected[:, 4], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("int8", 0.1), ("int4", 0.3)])
def test_rounded_weights_are_near(dtype: str, tolerance: float) -> None:
    config, weights = random_decoder("pre_norm_gated")
    x, memory, lengths = inputs(4, 3, 4)
    results = []
    for kind in ("float32", dtype):
        layer = DecoderLayer(config, weights.layers[0], dtype=kind)
        caches = layer.new_caches(memory, lengths, rows=4, capacity=3)
        results.append(
            torch.stack([layer(x[:, step], caches, torch.full((4,), step)) for step in range(3)])
        )
    difference = (results[1] - results[0]).norm() / results[0].norm()
    assert 0 < difference < tolerance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"from_tensor": torch.zeros(3, 22)}, "3 rows for 2 memories"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions has shape \[3\]"),
        ({"cache_rows": torch.tensor([0, 1, 2, 1])}, r"cache_rows\[3\] is 1 once more"),
    ],
    ids=str,
)
def test_bad_input(arguments: dict[str, torch.Tensor], message: str) -> None:
    config, weights = random_decoder("post_norm")
    _, memory, lengths = inputs(4, 1, 2)
    layer = DecoderLayer(config, weights.layers[0])
    caches = layer.new_caches(memory, lengths, rows=4, capacity=5)
    before = caches.self_keys.view(torch.int32).clone()
    given = {"from_tensor": torch.zeros(4, 22), "positions": torch.zeros(4).long(), **arguments}
    with pytest.raises(ValueError, match=message):
        layer(given.pop("from_tensor"), caches, given.pop("positions"), **given)
    assert caches.self_keys.view(torch.int32).equal(before)


def test_a_table_out_of_range_is_refused() -> None:
    config, weights = random_decoder("post_norm")
    _, memory, lengths = inputs(4, 1, 2)
    layer = DecoderLayer(config, weights.layers[0])
    caches = layer.new_caches(memory, lengths, rows=4, capacity=5)
    caches.table[2, 1] = 4
    with pytest.raises(ValueError, match=r"caches\.table"):
        layer(torch.zeros(4, 22), caches, torch.ones(4).long())


def test_weights_of_a_wrong_shape() -> None:
    config, weights = random_decoder("post_norm")
    wrong = weights.layers[0]._replace(qkv=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="qkv has shape"):
        DecoderLayer(config, wrong)
    with pytest.raises(ValueError, match="ffn_gate is None"):
        DecoderLayer(replace(config, gated=True), weights.layers[0])


def test_what_is_no_tensor() -> None:
    config, weights = random_decoder("post_norm")
    _, memory, lengths = inputs(4, 1, 2)
    layer = DecoderLayer(config, weights.layers[0])
    with pytest.raises(TypeError, match=r"new_caches: memory_lengths is of type list"):
        layer.new_caches(memory, lengths.tolist(), rows=4, capacity=5)
    caches = layer.new_caches(memory, lengths, rows=4, capacity=5)
    with pytest.raises(TypeError, match="DecoderLayer: positions is of type int"):
        layer(torch.zeros(4, 22), caches, 0)
    with pytest.raises(TypeError, match="DecoderLayer: requests is of type list"):
        layer(torch.zeros(4, 22), caches, torch.zeros(4).long(), requests=[0, 0, 1, 1])
