"""Whole calls of encoder-decoder models, as users make them, against CTranslate2."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.decoder.bench_decoding import PEER_TYPES, SOURCES  # noqa: F401
from benchmarks.decoder.ctranslate2_peer import translator, whisper
from benchmarks.goals import Goal, GoalOutcome, evaluate
from benchmarks.harness import OURS, Case, Contestant, Result

GROUP = "whole_call"
WORDS, TRANSLATE, TRANSCRIBE = "pronounce", "translate 20 tokens to 32", "transcribe 30 s"
CTRANSLATE2 = "CTranslate2"
_PRONUNCIATIONS = Path(__file__).parents[2] / "examples" / "g2p" / "model"
_LETTERS = ("decoder", "pronunciation", "read", "through", "beautiful", "international", "cat")
_NLLB = {"d_model": 1024, "layers": 12, "heads": 16, "ffn_dim": 4096, "vocab_size": 256206}
_WHISPERS = {
    "tiny": {"d_model": 384, "layers": 4, "heads": 6, "ffn_dim": 1536},
    "base": {"d_model": 512, "layers": 6, "heads": 8, "ffn_dim": 2048},
}
_SPECIAL = {
    "<|endoftext|>": 50257,
    "<|startoftranscript|>": 50258,
    "<|en|>": 50259,
    "<|transcribe|>": 50359,
    "<|nospeech|>": 50362,
    "<|notimestamps|>": 50363,
}
_START = [50258, 50259, 50359, 50363]
_BEAMS = 5


def _both_sides(d_model: int, layers: int, heads: int, ffn_dim: int, **more: Any) -> dict[str, Any]:
    """Return the sizes that encoder and decoder share, under the names of transformers."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", ffn_dim))
    }
    return {"d_model": d_model, **sides, **more}


@lru_cache(maxsize=1)
def _pronunciations() -> tuple[Any, Any]:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(_PRONUNCIATIONS, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(_PRONUNCIATIONS)


@lru_cache(maxsize=1)
def _nllb() -> Any:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(0)
    config = M2M100Config(**_both_sides(**_NLLB), activation_function="relu", scale_embedding=True)
    return M2M100ForConditionalGeneration(config).eval()


@lru_cache(maxsize=1)
def _whisper(name: str) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(**_both_sides(**_WHISPERS[name]), vocab_size=51865)
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config.update(
        suppress_tokens=None, begin_suppress_tokens=None, max_length=448, eos_token_id=50257
    )
    return model


@lru_cache(maxsize=1)
def _decoding(model: Any, dtype: str) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(model, dtype)


def _tokens(results: Any) -> int:
    """Count the new tokens of the best sequences of either side, of all rows."""
    if isinstance(results, torch.Tensor):  # ours, of generate
        return results.numel() - len(results) * len(_START)
    if hasattr(results[0], "sequences_ids"):  # CTranslate2's, of speech
        return sum(len(result.sequences_ids[0]) for result in results)
    if hasattr(results[0], "hypotheses"):
        return sum(len(result.hypotheses[0]) for result in results)
    return sum(int(result.lengths[0]) - result.prompt_length for result in results)


def _pair(
    with_peers: bool, ours: Callable[[], Any], peer: Callable[[], Callable[[], Any]]
) -> list[Contestant]:
    contestants = [Contestant(OURS, ours)]
    if with_peers and find_spec("ctranslate2") is not None:
        theirs = peer()
        results = [run() for run in (ours, theirs)]
        counts = [_tokens(of_all) for of_all in results]
        # Ours may count the ends of rows. Formats round differently, and few texts end elsewhere.
        if max(counts) > 1.3 * min(counts) + 2 * len(results[1]):
            raise ValueError(f"ours has {counts[0]} tokens, {CTRANSLATE2} {counts[1]}: no pair")
        contestants.append(Contestant(CTRANSLATE2, theirs))
    return contestants


def _words(with_peers: bool, *, count: int, beams: int, dtype: str) -> list[Contestant]:
    model, tokenizer = _pronunciations()
    words = [_LETTERS[i % len(_LETTERS)] for i in range(count)]
    ids = tokenizer(words).input_ids
    most = tokenizer.model_max_length - 1

    def peer() -> Callable[[], object]:
        run = translator(model, PEER_TYPES[dtype]).translate_batch
        source = [[str(token) for token in row] for row in ids]
        return lambda: run(source, beam_size=beams, max_decoding_length=most)

    translate = _decoding(model, dtype).translate
    ours = partial(translate, ids, num_beams=beams, max_new_tokens=most)
    return _pair(with_peers, ours, peer)


def _sentences(with_peers: bool, *, batch: int, dtype: str, beams: int) -> list[Contestant]:
    model, tokens = _nllb(), 32
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.vocab_size, (batch, 20), generator=generator).tolist()

    def peer() -> Callable[[], object]:
        run = translator(model, PEER_TYPES[dtype]).translate_batch
        source = [[str(token) for token in row] for row in ids]
        return lambda: run(
            source, beam_size=beams, min_decoding_length=tokens, max_decoding_length=tokens
        )

    ours = partial(
        _decoding(model, dtype).translate,
        ids,
        num_beams=beams,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
    )
    return _pair(with_peers, ours, peer)


def _speech(with_peers: bool, *, model: str, dtype: str, tokens: int) -> list[Contestant]:
    net = _whisper(model)
    features = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(1))
    end = _SPECIAL["<|endoftext|>"]

    def peer() -> Callable[[], object]:
        import ctranslate2

        run = whisper(net, PEER_TYPES[dtype], _SPECIAL).generate
        storage = ctranslate2.StorageView.from_array(features.numpy())
        # It generates half of the length at most.
        return lambda: run(
            storage,
            [_START],
            beam_size=_BEAMS,
            max_length=2 * tokens,
            suppress_tokens=[end],
            suppress_blank=False,
        )

    ours = partial(
        _decoding(net, dtype).generate,
        input_features=features,
        decoder_input_ids=torch.tensor([_START]),
        num_beams=_BEAMS,
        max_new_tokens=tokens,
        suppress_tokens=[end],
    )
    return _pair(with_peers, ours, peer)


def cases(quick: bool) -> list[Case]:
    """Return every case; with ``quick`` those of the small model that is shipped."""
    words = [
        Case(
            GROUP,
            WORDS,
            {"model": "pronunciation", "batch": count, "beams": beams, "dtype": dtype},
            partial(_words, count=count, beams=beams, dtype=dtype),
            clock="process",  # CTranslate2 computes in a thread of its own
        )
        for dtype in ("float32", "bfloat16", "int8")
        for count in ((1,) if quick else (1, 64))
        for beams in (1, 4)
    ]
    if quick:
        return words
    sentences = [
        Case(
            GROUP,
            TRANSLATE,
            {"model": "NLLB-600M", "batch": batch, "beams": 4, "dtype": dtype},
            partial(_sentences, batch=batch, beams=4, dtype=dtype),
            clock="process",
        )
        for dtype in ("float32", "int8")
        for batch in (1, 8)
    ]
    speech = [
        Case(
            GROUP,
            TRANSCRIBE,
            {"model": f"Whisper {model}", "batch": 1, "beams": _BEAMS, "dtype": dtype},
            partial(_speech, model=model, dtype=dtype, tokens=64),
            clock="process",
        )
        for model in _WHISPERS
        for dtype in ("float32", "bfloat16", "int8")
    ]
    return words + sentences + speech


def _versus(result: Result) -> float | None:
    return result.ratio(CTRANSLATE2)


def _of(**shape: str) -> Callable[[Result], bool]:
    return lambda result: all(result.case.shape[name] == value for name, value in shape.items())


def _goal(name: str, bound: float, with_tiles: bool | None, **shape: str) -> Goal:
    peer = f"{CTRANSLATE2} {PEER_TYPES[shape['dtype']]}"
    return Goal(
        name, "warm", peer, "at least", bound, _versus, [_of(**shape)], with_tiles=with_tiles
    )


GOALS = [
    _goal(WORDS, 1.2, False, dtype="float32"),
    _goal(WORDS, 1.15, True, dtype="float32"),
    _goal(WORDS, 1.2, None, dtype="int8"),
    *(_goal(TRANSCRIBE, 1.5, None, dtype=dtype) for dtype in ("float32", "int8")),
    *(_goal(TRANSCRIBE, bound, True, model="Whisper base", dtype=dtype)
      for dtype, bound in (("float32", 1.6), ("bfloat16", 1.5), ("int8", 2.0))),
]  # fmt: skip


def goals(results: list[Result]) -> list[GoalOutcome]:
    """Judge the goals on the worst of the cases that each speaks of."""
    return evaluate(GOALS, results)


def notes() -> list[str]:
    """Say what the table leaves open."""
    return [
        "whole_call: CPU time of the process, from lists of tokens, or features, to results. Ours "
        "is Decoding.translate, and generate for speech; CTranslate2's are translate_batch and "
        "Whisper.generate. The pronunciation model is trained, and ends words by itself; the "
        "others have random weights, and are held to 32 and 64 tokens. bfloat16 is compared with "
        "CTranslate2's int8."
    ]
