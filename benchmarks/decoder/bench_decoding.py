"""Translation by a transformer-base model, and its steps, against CTranslate2 and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch

import lmdecode
from benchmarks.attention.peak import INSTRUCTIONS, multiply_add
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import LIMIT, OURS, Case, Contestant, Result
from benchmarks.limits import slowest, streaming_read
from lmdecode.models.checks import stack_shapes

GROUP = "decoder"
SOURCES = (
    "decoder/decod", "decoder/encoder", "decoder/step_attention", "linear/packed", "linear/norms",
    "attention/sliding_window_attention", "beam/",
)  # fmt: skip
CALL, STEP = "translate 32 tokens", "a step of translation"
CTRANSLATE2, TRANSFORMERS = "CTranslate2", "transformers"
NUM_BEAMS, SOURCE = 4, 20
# What CTranslate2 has for a format: it computes in no bfloat16 on the CPU.
PEER_TYPES = {"float32": "float32", "bfloat16": "int8", "int8": "int8"}


@lru_cache(maxsize=1)
def make_model(layers: int, size: int, vocab: int) -> Any:
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=vocab,
            d_model=size,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=size // 64,
            decoder_attention_heads=size // 64,
            encoder_ffn_dim=4 * size,
            decoder_ffn_dim=4 * size,
            max_position_embeddings=512,
            activation_function="relu",
            scale_embedding=True,
            eos_token_id=0,
            pad_token_id=vocab - 1,
            decoder_start_token_id=vocab - 1,
            forced_eos_token_id=None,
        )
    ).eval()
    with torch.no_grad():
        model.model.shared.weight[-1] = 0.0  # which CTranslate2 begins with
    model.generation_config.max_length = None
    return model


@lru_cache(maxsize=1)
def _decoding(model: Any, dtype: str) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(model, dtype)


@lru_cache(maxsize=1)
def _bfloat16(model: Any) -> Any:
    import copy

    return copy.deepcopy(model).to(torch.bfloat16)


def _contestants(
    with_peers: bool,
    *,
    by_step: bool,
    batch: int,
    dtype: str,
    layers: int,
    size: int,
    vocab: int,
    steps: int,
) -> list[Contestant]:
    model = make_model(layers, size, vocab)
    ids = torch.randint(1, vocab - 1, (batch, SOURCE), generator=torch.Generator().manual_seed(1))
    fewer = steps // 4

    def contestant(name: str, translate: Callable[[int], object]) -> Contestant:
        """Whole calls, or what each step adds to one."""
        shorter = (partial(translate, fewer), steps - fewer) if by_step else None
        return Contestant(name, partial(translate, steps), shorter=shorter)

    def generate(model: Any, tokens: int) -> object:
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=NUM_BEAMS,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            bad_words_ids=[[vocab - 1]],
        )

    decoding = _decoding(model, dtype)
    sources = ids.tolist()

    def translate(tokens: int) -> object:
        return decoding.translate(
            sources,
            num_beams=NUM_BEAMS,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            bad_words_ids=[[vocab - 1]],
        )

    contestants = [contestant(OURS, translate)]
    if not with_peers:
        return contestants
    peer = _bfloat16(model) if dtype == "bfloat16" else model
    contestants.append(contestant(TRANSFORMERS, torch.no_grad()(partial(generate, peer))))
    limit = _limit(decoding.decoder, dtype, batch * NUM_BEAMS, 1 if by_step else steps)
    if limit is not None:
        contestants.append(Contestant(LIMIT, limit))
    if find_spec("ctranslate2") is not None:
        contestants.append(contestant(CTRANSLATE2, _ctranslate2(model, ids, dtype)))
    return contestants


def _limit(decoder: Any, dtype: str, rows: int, steps: int) -> Callable[[], object] | None:
    """Return reads of the weights that steps multiply with, or the products if they take longer."""
    shapes = stack_shapes(decoder.config)
    logits = math.prod(shapes.pop("logits"))
    for other in ("cross_key_value", "ffn_gate"):  # once a request, and of gated models
        shapes.pop(other)
    weights = logits + decoder.config.num_layers * sum(map(math.prod, shapes.values()))
    products = multiply_add(2.0 * steps * rows * weights, INSTRUCTIONS[dtype])
    reads = [
        streaming_read(part)
        for name, part in decoder.parts.items()
        if part.dtype == torch.uint8 and not name.endswith(".cross_key_value")  # once a request
    ]
    return slowest([lambda: [read() for _ in range(steps) for read in reads], products])


def _ctranslate2(model: Any, ids: torch.Tensor, dtype: str) -> Callable[[int], object]:
    from benchmarks.decoder.ctranslate2_peer import translator

    translate = translator(model, PEER_TYPES[dtype]).translate_batch
    source = [[str(token) for token in row] for row in ids.tolist()]
    return lambda tokens: translate(
        source,
        beam_size=NUM_BEAMS,
        min_decoding_length=tokens,
        max_decoding_length=tokens,
        length_penalty=1.0,
    )


def cases(quick: bool) -> list[Case]:
    """Return every case, or with ``quick`` one small model."""
    model = (
        dict(layers=1, size=64, vocab=500, steps=4)
        if quick
        else dict(layers=6, size=512, vocab=32000, steps=32)
    )
    return [
        Case(
            GROUP,
            STEP if by_step else CALL,
            {"batch": batch, "beams": NUM_BEAMS, "V": model["vocab"], "dtype": dtype},
            partial(_contestants, by_step=by_step, batch=batch, dtype=dtype, **model),
            clock="process",  # CTranslate2 computes in a thread of its own
        )
        for dtype in ("float32", "bfloat16", "int8")
        for by_step in (True, False)
        for batch in ((1,) if quick else (1, 8, 32))
    ]


def _versus(result: Result) -> float | None:
    return result.ratio(CTRANSLATE2)


def _is(dtype: str, batch: int) -> Callable[[Result], bool]:
    def condition(result: Result) -> bool:
        shape = result.case.shape
        return (shape["dtype"], shape["batch"], shape["V"]) == (dtype, batch, 32000)

    return condition


def _goals(
    name: str, bounds: Sequence[tuple[str, int, float]], with_tiles: bool | None = None
) -> list[Goal]:
    return [
        Goal(name, "warm", f"{CTRANSLATE2} {PEER_TYPES[dtype]}", "at least", bound, _versus,
             [_is(dtype, batch)], with_tiles=with_tiles)
        for dtype, batch, bound in bounds
    ]  # fmt: skip


GOALS = [
    *_goals(STEP, (
        ("float32", 1, 2.5), ("float32", 8, 1.6), ("float32", 32, 1.4),
        ("int8", 1, 2.5), ("int8", 8, 1.5), ("int8", 32, 1.5),
        ("bfloat16", 1, 1.0), ("bfloat16", 8, 1.0),
    ), with_tiles=False),
    *_goals(CALL, (
        ("float32", 1, 2.5), ("float32", 8, 2.0), ("float32", 32, 1.5),
        ("int8", 1, 3.5), ("int8", 8, 2.3), ("int8", 32, 1.8),
        ("bfloat16", 1, 2.2), ("bfloat16", 8, 1.6), ("bfloat16", 32, 1.3),
    ), with_tiles=False),
    *(goal for name in (STEP, CALL) for goal in _goals(name, (
        ("float32", 1, 1.7), ("float32", 8, 1.6),
        ("int8", 1, 2.5), ("int8", 8, 2.5), ("int8", 32, 2.5),
        ("bfloat16", 1, 1.5), ("bfloat16", 8, 1.5), ("bfloat16", 32, 1.5),
    ), with_tiles=True)),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)


def notes() -> list[str]:
    """Say what the table leaves open."""
    return [
        "decoder: CPU time of the process. A step is what each of 24 more tokens adds to a call of "
        "8, so without encoder and start; a call has the encoder in it, and ours is "
        "Decoding.translate. The limit of a step is one read of the packed weights "
        "that it multiplies with, or the peak of its products where that takes longer; attention, "
        "norms and the choice of tokens are in neither. CTranslate2 has no bfloat16 on the CPU: "
        "ours is compared with its int8."
    ]
