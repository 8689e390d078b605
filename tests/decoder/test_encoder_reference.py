"""The encoder in C++ against its reference: random encoders, of every switch."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import lmdecode
from lmdecode.models.configs import EncoderConfig
from lmdecode.models.packed_stack import PackedEncoder
from lmdecode.models.weights import EncoderLayerWeights, EncoderWeights
from lmdecode.reference.encoder import encoder_forward
from tests.support.quantized_once import quantized_once  # noqa: F401

LENGTHS = (7, 30, 0, 1, 12)
MANY = (*LENGTHS, 530, *[33] * 20)  # more than are computed together
SIZE, HEADS, HEAD, FFN, VOCAB, LAYERS = 22, 3, 10, 34, 50, 2
ATTENTION = HEADS * HEAD
SWITCHES = list(
    itertools.product(
        ("layer_norm", "rms_norm"), (False, True), (False, True), ("none", "shared", "of layers")
    )
)


def random_encoder(
    norm: Any, norm_first: bool, gated: bool, bias: str, longest: int = 30
) -> tuple[EncoderConfig, EncoderWeights]:
    """Return an encoder with these switches, the others by lot; sizes are no vector's multiples."""
    seed = SWITCHES.index((norm, norm_first, gated, bias))
    lot = random.Random(seed)
    torch.manual_seed(seed)
    config = EncoderConfig(
        LAYERS, SIZE, HEADS, HEAD, FFN, VOCAB,
        norm=norm, norm_first=norm_first, gated=gated,
        norm_epsilon=lot.choice([1e-5, 1e-2]),
        activation=lot.choice(["relu", "gelu", "gelu_tanh", "silu"]),
        attention_scale=lot.choice([None, 0.7]),
        embedding_scale=lot.choice([1.0, 3.0]),
        position_offset=lot.choice([0, 2]),
    )  # fmt: skip

    def perhaps(tensor: Tensor) -> Tensor | None:
        return tensor if lot.random() < 0.7 else None

    def linear(out: int, inner: int) -> tuple[Tensor, Tensor | None]:
        return torch.randn(out, inner) * inner**-0.5, perhaps(torch.randn(out) * 0.1)

    def norm_weights() -> tuple[Tensor | None, Tensor | None]:
        gamma = perhaps(1 + 0.3 * torch.randn(SIZE))
        return gamma, None if gamma is None or norm == "rms_norm" else perhaps(torch.randn(SIZE))

    layers = tuple(
        EncoderLayerWeights(
            *norm_weights(), *linear(3 * ATTENTION, SIZE), *linear(SIZE, ATTENTION),
            *norm_weights(), *linear(FFN, SIZE), *(linear(FFN, SIZE) if gated else (None, None)),
            *linear(SIZE, FFN),
        )
        for _ in range(LAYERS)
    )  # fmt: skip
    tables = {"none": 0, "shared": HEADS, "of layers": LAYERS * HEADS}[bias]
    return config, EncoderWeights(
        torch.randn(VOCAB, SIZE),
        perhaps(torch.randn(longest + 5 + config.position_offset, SIZE)),
        torch.randn(tables, 2 * longest + 1) if tables else None,  # one more than is needed
        *norm_weights(),
        *norm_weights(),
        layers=layers,
    )


def rows_of(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return where each begins, and positions that begin later in every other one."""
    begins = torch.tensor((0, *lengths)).cumsum(0)
    return begins, torch.cat([torch.arange(n) + 3 * (i % 2) for i, n in enumerate(lengths)])


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("switches", SWITCHES)
def test_against_the_reference(switches: tuple[Any, ...]) -> None:
    config, weights = random_encoder(*switches)
    packed, rows = PackedEncoder(config, weights), rows_of(LENGTHS)
    tokens = torch.randint(VOCAB, (sum(LENGTHS),))
    inputs = torch.randn(sum(LENGTHS), SIZE)
    for given in ({"tokens": tokens}, {"inputs": inputs}):
        want = encoder_forward(config, weights, *rows, **given, dtype=torch.float64)
        assert relative(packed.forward(*rows, **given), want) < 1e-5
        assert relative(encoder_forward(config, weights, *rows, **given), want) < 1e-5


@pytest.mark.usefixtures("quantized_once")
@pytest.mark.parametrize("weight_format", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("switches", SWITCHES[::5])
def test_formats(switches: tuple[Any, ...], weight_format: str) -> None:
    """Each row as close as in float32, but where an input is rounded to the other side."""
    config, weights = random_encoder(*switches, longest=530)
    rows, tokens = rows_of(MANY), torch.randint(VOCAB, (sum(MANY),))
    got = PackedEncoder(config, weights, weight_format).forward(*rows, tokens=tokens)
    want = encoder_forward(
        config, weights, *rows, tokens=tokens, weight_format=weight_format, dtype=torch.float64,
        attention_dtype=torch.bfloat16 if lmdecode.cpu_capability() == "amx" else None,
    )  # fmt: skip
    of_rows = (got - want).abs().amax(1) / want.abs().max()
    assert of_rows.median() < 1e-6
    assert of_rows.max() < 0.02


def test_no_sequences() -> None:
    config, weights = random_encoder(*SWITCHES[1])
    for weight_format in ("float32", "int4"):
        nothing = torch.empty(0, dtype=torch.int64)
        got = encoder_forward(
            config, weights, torch.tensor([0]), nothing, tokens=nothing, weight_format=weight_format
        )
        assert got.shape == (0, SIZE)
