"""Cases of whole texts: every way of choosing, by every public route, with the errors."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.digests.kinds import FORMATS, Kinds, Parts
from tests.decoder.decoder_models import END, MODELS, make_inputs, make_model
from tests.decoder.decoder_models import VOCAB as SMALL_VOCAB
from tests.decoder.test_causal_assistant import Collected
from tests.decoder.test_causal_generate import ANY_RULES, ragged
from tests.decoder.test_decoding_generate import PROCESSORS
from tests.decoder.test_translate import lists
from tests.engine.engine_cases import OddTokens
from tests.integrations.transformers.stored_decoding import store_of
from tests.serving.servers import call as call_server
from tests.serving.servers import load_model, serving
from tests.speech.models import EASY, sound, transcriber
from tests.support.causal_models import CASES, EOS, VOCAB, random_model, random_tokens
from tests.support.drafts import noisy

KINDS = Kinds("texts", has_ops=False)
_OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@functools.cache
def _causal(architecture: str, variant: str, weight_format: str) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model(architecture, variant), weight_format)


@functools.cache
def _encoder_decoder(kind: str, weight_format: str) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(make_model(kind), weight_format)


def _found(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or its error's type and text."""
    try:
        return call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def _ways(choice: random.Random, number: int, vocab: int) -> dict[str, Any]:
    """Return how a text is chosen: an option or several that change the route of the call."""
    ways: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": number, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
        {"do_sample": True, "seed": number, "typical_p": 0.7, "repetition_penalty": 1.2},
        {"num_beams": 4, "num_return_sequences": choice.randint(1, 4)},
        {"num_beams": 3, "early_stopping": "never", "length_penalty": -0.5},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
        {"num_beams": 3, "force_words_ids": [[choice.randrange(3, vocab)]]},
        {"num_beams": 2, "do_sample": True},
        choice.choice(ANY_RULES) if vocab == VOCAB else choice.choice(PROCESSORS),
        {**(choice.choice(ANY_RULES[:4])), "num_beams": choice.randint(1, 3)},
    ]
    return choice.choice(ways)


@KINDS.add(60)
def generate(choice: random.Random, number: int) -> Parts:
    """Decoder-only models: drafts, streamers and a store with any way of choosing."""
    case = choice.choice(CASES)
    decoding = _causal(*case, choice.choice(FORMATS))
    is_stored = choice.random() < 0.15
    rows = 1 if is_stored else choice.randint(1, 4)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, **ragged(number, rows)}
    options |= _ways(choice, number, VOCAB)
    if choice.random() < 0.4:
        options |= _OUTPUTS
    if choice.random() < 0.2:
        options |= choice.choice(
            ({"prompt_lookup_num_tokens": 3}, {"assistant_model": noisy(*case)})
        )
    streamer = Collected() if choice.random() < 0.15 else None
    if streamer:
        options["streamer"] = streamer
    if is_stored:
        with tempfile.TemporaryDirectory() as folder, store_of(decoding, Path(folder)) as store:
            for _ in range(2):  # written, and read
                torch.manual_seed(number)
                yield _found(lambda: decoding.generate(store=store, **options))
    else:
        yield _found(lambda: decoding.generate(**options))
    if streamer:
        yield streamer.tokens, streamer.has_ended


@KINDS.add(40)
def generate_of_encoder_decoder(choice: random.Random, number: int) -> Parts:
    kind = choice.choice(list(MODELS))
    decoding = _encoder_decoder(kind, choice.choice(FORMATS))
    options: dict[str, Any] = {
        "max_new_tokens": 10,
        **make_inputs(kind, choice.randint(1, 3), number),
    }
    options |= _ways(choice, number, SMALL_VOCAB)
    if kind != "whisper" and choice.random() < 0.4:
        options |= _OUTPUTS
    streamer = Collected() if choice.random() < 0.15 else None
    if streamer:
        options["streamer"] = streamer
    yield _found(lambda: decoding.generate(**options))
    if streamer:
        yield streamer.tokens, streamer.has_ended


@KINDS.add(20)
def translate(choice: random.Random, number: int) -> Parts:
    decoding = _encoder_decoder(choice.choice(sorted(MODELS.keys() - {"whisper"})), "float32")
    options: dict[str, Any] = {"max_new_tokens": 9, "num_beams": choice.choice((1, 1, 2, 4))}
    options |= choice.choice(
        (
            {}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"length_penalty": 0.2},
            {"early_stopping": True}, {"min_new_tokens": 4}, {"eos_token_id": [END, 5]},
            {"num_return_sequences": options["num_beams"]}, {"do_sample": True}, {"top_k": 3},
        )
    )  # fmt: skip
    sources = lists(make_inputs("marian", choice.randint(1, 7), number))
    yield _found(lambda: decoding.translate(sources, max_batch_tokens=30, **options))


@KINDS.add(15)
def causal_batch(choice: random.Random, number: int) -> Parts:
    """Requests that begin and end apart, each token the caller's own choice."""
    decoding = _causal(*choice.choice(CASES), choice.choice(FORMATS))
    batch: Any = decoding.batch(
        max_requests=3, capacity=100, max_step_tokens=choice.choice((3, 8, 512))
    )
    waiting = [random_tokens(choice.randint(1, 40), number + at) for at in range(5)]
    tokens: dict[Any, int] = {}
    left = dict.fromkeys(range(5), 6)
    while waiting or batch.running:
        while waiting and batch.free_places:
            batch.add(waiting.pop().tolist(), request_id=len(waiting))
        logits = batch.step(tokens)
        tokens = {}
        for request, row in sorted(logits.items()):
            yield request, row
            left[request] -= 1
            if left[request]:
                tokens[request] = int(row.argmax())
            else:
                batch.remove(request)


@KINDS.add(20)
def engine(choice: random.Random, number: int) -> Parts:
    """Requests with options that one kind alone takes, and grammars."""
    decoding = _causal(*choice.choice(CASES), choice.choice(FORMATS))
    running = decoding.engine(max_requests=4, capacity=120)
    kinds: list[dict[str, Any]] = [
        {}, {"seed": number, "temperature": 1.4, "min_p": 0.02}, {"num_beams": 3},
        {"grammar": 5}, {"seed": 2, "grammar": None},
        {"num_beams": 2, "num_return_sequences": 2}, {"min_tokens": 4}, {"seed": -1},
        {"logit_bias": {5: 3.0, 9: -100.0}}, {"dry_multiplier": 0.8}, {"top_h": 0.4, "seed": 9},
        {"logprobs": 2}, {"seed": 1, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    ]  # fmt: skip

    def submit(options: dict[str, Any]) -> Any:
        if "grammar" in options:  # each request has a state of its own
            options = {**options, "grammar": OddTokens(ends_after=options["grammar"])}
        return running.submit(
            random_tokens(choice.randint(1, 30), number).tolist(), max_new_tokens=9,
            eos_token_id=[EOS, 7], **options,
        )  # fmt: skip

    requests = [_found(functools.partial(submit, choice.choice(kinds))) for _ in range(4)]
    while running.has_work:
        running.step()
    for request in requests:
        result = request if isinstance(request, str) else _found(request.result)
        if isinstance(result, str):
            yield result
            continue
        yield result.tokens, result.finish_reason, result.logprobs
        if result.beams is not None:
            yield result.beams.sequences, result.beams.scores


@KINDS.add(15)
def transcribe(choice: random.Random, number: int) -> Parts:
    model = transcriber(choice.randrange(3))
    options = {**EASY, "beam_size": choice.choice((1, 1, 3))}
    options |= choice.choice(
        (
            {}, {"word_timestamps": True}, {"without_timestamps": True}, {"language": "German"},
            {"temperature": (0.0, 0.6), "log_prob_threshold": -0.1}, {"no_repeat_ngram_size": 3},
            {"repetition_penalty": 1.3}, {"initial_prompt": "a b"}, {"batch_size": 2},
            {"condition_on_previous_text": True}, {"patience": 2.0}, {"no_speech_threshold": 0.3},
        )
    )  # fmt: skip
    torch.manual_seed(number)

    def run() -> Any:
        segments, info = model.transcribe(sound(choice.choice((1.5, 4.0, 7.0)), number), **options)
        return list(segments), info.language, info.language_probability

    yield _found(run)


@functools.cache
def _port() -> int:
    """Return the port of a server that runs until the process ends."""
    from lmdecode.serving.app import create_app

    model = load_model("int8")
    app = create_app(model.decoding.engine(max_requests=4, capacity=512), model)
    running = serving(app)
    _KEPT.append(running)
    return running.__enter__()


_KEPT: list[Any] = []


def _added(old: Any, new: Any) -> Any:
    """Return what two parts of a stream say of one field."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _added(old.get(name), value) for name, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    return new if old in (None, new) else [old, new]


def _joined(parts: list[dict[str, Any]]) -> dict[int, str]:
    """Return what the parts of a stream say in all, as JSON, by the place of their choice."""
    found: dict[int, dict[str, Any]] = {}
    for part in parts:
        for one in part.get("choices", [part]):
            of_choice = found.setdefault(one.get("index", -1), {"text": "", "more": {}})
            delta = one.pop("delta", one)
            of_choice["text"] += delta.pop("content", None) or delta.pop("text", None) or ""
            one.pop("index", None)  # once a part, and how many there are is a matter of time
            more = {name: value for name, value in {**delta, **one}.items() if value}
            of_choice["more"] = _added(of_choice["more"], more)
    return {index: json.dumps(one, sort_keys=True) for index, one in found.items()}


@KINDS.add(20)
def body(choice: random.Random, number: int) -> Parts:
    """Bodies of the server, and what it answers: statuses, texts, errors."""
    base: tuple[str, dict[str, Any]] = choice.choice(
        (
            ("/v1/completions", {"prompt": choice.choice(("Who", "In the", ["And", "But"]))}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who was it?"}]}),
        )
    )
    path, asked = base
    asked |= {"max_tokens": choice.randint(1, 12), "seed": number}
    more: tuple[dict[str, Any], ...] = (
        {"temperature": 0}, {"top_p": 0.7}, {"n": 2}, {"stop": ["the", "and"]},
        {"stream": True}, {"logprobs": 1}, {"logprobs": True}, {"num_beams": 2},
        {"logit_bias": {"40": 4}}, {"echo": True}, {"frequency_penalty": 0.9},
        {"response_format": {"type": "json_object"}}, {"min_tokens": 5}, {"top_k": 3},
        {"temperature": -1}, {"unknown": 1}, {"seed": "a"}, {"regex": "[a-z ]+"},
    )  # fmt: skip
    for fields in choice.sample(more, choice.randint(0, 3)):
        asked |= fields
    status, found, _ = call_server(_port(), "POST", path, asked)
    yield status
    parts = [found]
    if isinstance(found, str):
        parts = [json.loads(line[6:]) for line in found.splitlines() if line.startswith("data: {")]
        # When a part comes, and how much it has, is a matter of time; its choice's text is not.
        parts = [json.loads(text) for text in sorted(_joined(parts).values())]
    for part in parts:
        for name in ("id", "created", "timings"):
            part.pop(name, None)
        yield json.dumps(part, sort_keys=True)


@KINDS.add(10)
def packed(choice: random.Random, number: int) -> Parts:
    """The bytes that a model is packed into, by the hash that marks stores."""
    decoding = _causal(*choice.choice(CASES), choice.choice(FORMATS))
    yield decoding.fingerprint().weights_hash
