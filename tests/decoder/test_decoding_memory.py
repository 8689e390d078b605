"""What a run takes at its peak: hardly more than weights and caches, whatever the beams."""

import sys
from collections.abc import Callable, Iterable

import pytest
import torch

import lmdecode
from lmdecode import BeamRequest
from lmdecode.decoder.state import new_caches
from lmdecode.demo.peak_memory import peak_memory
from tests.decoder.random_decoder import random_decoder

NUM_BEAMS, REQUESTS, SOURCE, NEW_TOKENS = 8, 6, 400, 150

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _caches(decoding: lmdecode.Decoding, source: int, requests: int = REQUESTS) -> int:
    """Bytes of caches with one cross cache a request, which its beams share."""
    rows = requests * NUM_BEAMS
    return _bytes(new_caches(decoding.config, requests, rows, NEW_TOKENS + 1, source))


def _decoding() -> lmdecode.Decoding:
    config, weights = random_decoder("post_norm", vocab=2000, layers=6, heads=16, head=32)
    positions = torch.randn(NEW_TOKENS + 3, config.model_size)
    return lmdecode.Decoding(config, weights._replace(positions=positions))


def _run_full_batch(decoding: lmdecode.Decoding, requests: int, tokens: int) -> None:
    batch = decoding.batch(
        max_requests=requests, num_beams=NUM_BEAMS, capacity=tokens + 1, source=SOURCE
    )
    for _ in range(requests):
        request = BeamRequest([1], num_beams=NUM_BEAMS, max_new_tokens=tokens, eos_token_id=None)
        batch.add(request, torch.randn(SOURCE, 18))
    assert all(result.num_steps == tokens for result in batch.run())


def full_batch() -> Callable[[], object]:
    decoding = _decoding()
    _run_full_batch(decoding, 1, 2)  # threads and code that is loaded late are not of the run
    return lambda: _run_full_batch(decoding, REQUESTS, NEW_TOKENS)


@pytest.mark.slow
def test_a_batch_takes_weights_and_caches() -> None:
    decoding = _decoding()
    weights, caches = _bytes(decoding.decoder.of_model), _caches(decoding, SOURCE)
    assert caches > 20 * weights  # so that the bound is one on all that is beside the caches
    taken = peak_memory(full_batch)
    assert caches <= taken
    assert weights + taken <= 1.2 * (weights + caches)


def _model() -> lmdecode.Decoding:
    from tests.support.tiny_models import seeded_model

    model = seeded_model(
        "MarianMTModel", vocab_size=500, d_model=128, encoder_layers=1, decoder_layers=6,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_position_embeddings=512, eos_token_id=0, pad_token_id=499,
        decoder_start_token_id=499, forced_eos_token_id=None,
    )  # fmt: skip
    model.generation_config.max_length = None
    return lmdecode.Decoding.from_pretrained(model)


def _generate(decoding: lmdecode.Decoding, requests: int, source: int, tokens: int) -> None:
    ids = torch.randint(1, 400, (requests, source), generator=torch.Generator().manual_seed(1))
    sequences = decoding.generate(
        ids, num_beams=NUM_BEAMS, min_new_tokens=tokens, max_new_tokens=tokens
    )
    assert sequences.shape == (requests, tokens + 1)


def generate_call(requests: int, source: int) -> Callable[[], object]:
    decoding = _model()
    _generate(decoding, 1, source, 2)
    return lambda: _generate(decoding, requests, source, NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("source", [150, 400])
def test_generate_takes_weights_and_caches(source: int) -> None:
    """The encoder included, and its result, which transformers repeats for every beam."""
    pytest.importorskip("transformers")
    decoding, requests = _model(), 4 * REQUESTS  # 200 MB: a few are torch's own, whatever it is
    weights = _bytes(decoding.decoder.of_model)
    caches = _caches(decoding, source, requests)
    assert caches > 20 * weights
    taken = peak_memory(generate_call, requests, source)
    assert 0.9 * caches <= taken  # seen at all: a little comes from what the warm-up left
    assert weights + taken <= 1.2 * (weights + caches)
