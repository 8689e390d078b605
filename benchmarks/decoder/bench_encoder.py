"""Encoders of Marian's and Whisper's base shapes against those of transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import lmdecode
from benchmarks.attention.peak import INSTRUCTIONS, multiply_add
from benchmarks.decoder.bench_decoding import TRANSFORMERS, make_model
from benchmarks.harness import LIMIT, OURS, Case, Contestant
from lmdecode.models.checks import stack_shapes
from lmdecode.models.configs import EncoderConfig
from lmdecode.models.packed_stack import PackedEncoder

GROUP = "encoder"
SOURCES = ("decoder/encoder", "attention/sliding_window_attention", "linear/")
SENTENCES, SPEECH = "sentences of 20 to 40 tokens", "frames of speech"
DTYPES = ("float32", "bfloat16", "int8")


@lru_cache(maxsize=1)
def _whisper(layers: int, size: int, frames: int) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=size,
        encoder_layers=layers,
        decoder_layers=1,
        encoder_attention_heads=size // 64,
        decoder_attention_heads=size // 64,
        encoder_ffn_dim=4 * size,
        decoder_ffn_dim=4 * size,
        max_source_positions=frames,
    )
    return WhisperForConditionalGeneration(config).eval()


def _limit(config: EncoderConfig, lengths: Tensor, dtype: str) -> Callable[[], object] | None:
    """Return all products: of the linear layers in ``dtype``, of attention as ours does them."""
    shapes = stack_shapes(config)
    if not config.gated:
        del shapes["ffn_gate"]
    linear = int(lengths.sum()) * sum(map(math.prod, shapes.values()))
    attention = 2 * int((lengths * lengths).sum()) * config.attention_size  # keys, then values
    by_tiles = lmdecode.cpu_capability() == "amx" and dtype != "float32"
    parts = (
        multiply_add(2.0 * config.num_layers * linear, INSTRUCTIONS[dtype]),
        multiply_add(2.0 * config.num_layers * attention, "bf16" if by_tiles else "f32"),
    )
    if None in parts:
        return None
    return lambda: [part() for part in parts if part is not None]


def _contestants(
    with_peers: bool,
    *,
    model: Any,
    dtype: str,
    lengths: Tensor,
    given: dict[str, Tensor],
    peer: Callable[[Any, torch.dtype], object],
) -> list[Contestant]:
    from lmdecode.readers.transformers.encoder_decoder import encoder_of

    packed = PackedEncoder(*encoder_of(model), dtype)
    begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    contestants = [Contestant(OURS, partial(packed.forward, begins, positions, **given))]
    if not with_peers:
        return contestants
    computed = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    own = copy.deepcopy(model.get_encoder()).to(computed)
    contestants.append(Contestant(TRANSFORMERS, torch.no_grad()(partial(peer, own, computed))))
    limit = _limit(packed.config, lengths, dtype)
    if limit is not None:
        contestants.append(Contestant(LIMIT, limit))
    return contestants


def _lengths(batch: int) -> Tensor:
    return torch.randint(20, 41, (batch,), generator=torch.Generator().manual_seed(1))


def _sentences(
    with_peers: bool, *, batch: int, dtype: str, layers: int, size: int, vocab: int
) -> list[Contestant]:
    generator, lengths = torch.Generator().manual_seed(1), _lengths(batch)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(1, vocab - 1, mask.shape, generator=generator)
    ids[~mask] = vocab - 1

    def peer(own: Any, _: torch.dtype) -> object:
        return own(input_ids=ids, attention_mask=mask.long())[0]

    model = make_model(layers, size, vocab)
    return _contestants(
        with_peers, model=model, dtype=dtype, lengths=lengths, given={"tokens": ids[mask]},
        peer=peer,
    )  # fmt: skip


def _speech(
    with_peers: bool, *, dtype: str, layers: int, size: int, frames: int
) -> list[Contestant]:
    inputs = torch.randn(frames, size, generator=torch.Generator().manual_seed(1))

    def peer(own: Any, computed: torch.dtype) -> Any:
        x = (inputs.to(computed) + own.embed_positions.weight)[None]
        for layer in own.layers:
            x = layer(x, None)
        return own.layer_norm(x)[0]

    model = _whisper(layers, size, frames)
    return _contestants(
        with_peers, model=model, dtype=dtype, lengths=torch.tensor([frames]),
        given={"inputs": inputs}, peer=peer,
    )  # fmt: skip


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` small models."""
    sizes = {"layers": 1, "size": 64} if quick else {"layers": 6, "size": 512}
    vocab, frames, batches = (500, 30, (1,)) if quick else (32000, 1500, (1, 32))
    shape = {"layers": sizes["layers"], "D": sizes["size"]}
    sentences = [
        Case(
            GROUP,
            SENTENCES,
            {**shape, "batch": batch, "rows": int(_lengths(batch).sum()), "dtype": dtype},
            partial(_sentences, batch=batch, dtype=dtype, vocab=vocab, **sizes),
            clock="process",  # the limit is that of one thread
        )
        for dtype in DTYPES
        for batch in batches
    ]
    speech = [
        Case(
            GROUP,
            SPEECH,
            {**shape, "batch": 1, "rows": frames, "dtype": dtype},
            partial(_speech, dtype=dtype, frames=frames, **sizes),
            clock="process",
        )
        for dtype in DTYPES
    ]
    return sentences + speech


def notes() -> list[str]:
    """Say what the table leaves open."""
    return [
        "encoder: CPU time of the process, of Marian's and Whisper's base shapes with random "
        "weights. transformers computes in float32 beside int8, and pads sentences to the longest. "
        "Whisper's rows are those behind its convolutions, which neither computes. The limit is "
        "the peak of the products: those of linear layers in the dtype, those of attention in "
        "float32, which ours takes in every dtype without matrix units; norms, activations and "
        "softmax are not in it."
    ]
