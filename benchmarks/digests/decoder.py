"""Cases of whole models: their parts, their steps, and texts of them."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

import lmdecode
from benchmarks.digests.kinds import FORMATS, Kinds, Parts
from lmdecode.linear.quantized_weight import KINDS as BLOCKS
from lmdecode.models.packed_causal import PackedCausalModel
from lmdecode.models.packed_stack import PackedEncoder
from tests.decoder import test_encoder_reference as encoders
from tests.decoder.causal_steps import (
    Entry,
    generated_logits,
    new_caches,
    packed,
    prompt_logits,
    state,
    step,
    wide,
)
from tests.decoder.contracts import gather_tree
from tests.decoder.decoder_models import MODELS, make_inputs, make_model
from tests.decoder.random_decoder import KINDS as DECODERS
from tests.decoder.random_decoder import random_decoder
from tests.decoder.test_causal_generate import ragged
from tests.decoder.test_decoder_layer import inputs
from tests.decoder.test_decoding_batch import REQUESTS, SIZES, memories
from tests.decoder.test_decoding_generate import PROCESSORS
from tests.decoder.test_experts_company import _model as model_with_experts
from tests.decoder.test_mamba2 import MIXERS, model_with
from tests.engine import engine_cases
from tests.engine.test_engine import MODELS as ENGINES
from tests.readers.gguf.test_gguf_models import WIDE
from tests.support.causal_models import CASES, model_of, random_config, random_model, random_tokens
from tests.support.gguf_files import write_model
from tests.support.random_tensors import randint, randn

KINDS = Kinds("decoder")

# --- Encoder-decoder models -----------------------------------------------------------------------


@KINDS.add(40)
def decoder_layer(choice: random.Random, number: int) -> Parts:
    kind, head = choice.choice(list(DECODERS)), choice.choice((1, 10, 16, 33))
    config, weights = random_decoder(kind, seed=number, heads=choice.randint(1, 4), head=head)
    dtype, bias = choice.choice(FORMATS), weights.relative_bias
    layer = lmdecode.DecoderLayer(config, weights.layers[0], bias, dtype=dtype)
    requests, beams, steps = choice.randint(1, 3), choice.randint(1, 4), choice.randint(1, 12)
    rows = requests * beams
    x, memory, lengths = inputs(rows, steps, requests)
    caches = layer.new_caches(memory, lengths, rows=rows, capacity=steps)
    for at in range(steps):
        yield layer(x[:, at], caches, torch.full((rows,), at))


@functools.cache
def _encoder(switches: tuple[Any, ...], weight_format: str) -> PackedEncoder:
    return PackedEncoder(*encoders.random_encoder(*switches, longest=530), weight_format)


@KINDS.add(40)
def encoder_forward(choice: random.Random, number: int) -> Parts:
    encoder = _encoder(choice.choice(encoders.SWITCHES), choice.choice(FORMATS))
    lengths = tuple(choice.choice((0, 1, 7, 12, 30, 65)) for _ in range(choice.randint(1, 5)))
    if choice.random() < 0.05:
        lengths = (*lengths, 530)  # more rows than are computed together
    begins, positions = encoders.rows_of(lengths)
    rows = int(begins[-1])
    tokens = randint(encoders.VOCAB, rows, seed=number)
    yield encoder.forward(begins, positions, tokens=tokens)
    yield encoder.forward(begins, positions, inputs=randn(rows, encoders.SIZE, seed=number))


@functools.cache
def _random_decoding(kind: str, weight_format: str) -> lmdecode.Decoding:
    return lmdecode.Decoding(*random_decoder(kind), dtype=weight_format)


@KINDS.add(40)
def decoding_batch(choice: random.Random, number: int) -> Parts:
    """Searches that share steps."""
    batch = _random_decoding(choice.choice(list(DECODERS)), choice.choice(FORMATS)).batch(**SIZES)
    requests = list(zip(REQUESTS, memories(number), strict=True))
    for place, (arguments, memory) in enumerate(choice.sample(requests, 3)):
        batch.add(lmdecode.BeamRequest(**arguments, request_id=place), memory)
    yield batch.run()


@functools.cache
def _encoder_decoder(kind: str, weight_format: str) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(make_model(kind), weight_format)


@KINDS.add(15)
def generate_of_encoder_decoder(choice: random.Random, number: int) -> Parts:
    kind, beams = choice.choice(list(MODELS)), choice.choice((1, 1, 4, 5))
    given: dict[str, Any] = {"max_new_tokens": 10, "num_beams": beams}
    if kind != "whisper":
        given |= {"return_dict_in_generate": True, "output_scores": True}
        given |= choice.choice(({}, {}, *PROCESSORS))
    sources = make_inputs(kind, choice.randint(1, 3), number)
    yield _encoder_decoder(kind, choice.choice(FORMATS)).generate(**sources, **given)


@KINDS.add(10)
def time_warping_and_gather_tree(choice: random.Random, number: int) -> Parts:
    cost = randn(choice.randint(1, 40), choice.randint(1, 90), seed=number)
    yield torch.ops.lmdecode.dynamic_time_warping(cost)
    sizes = (choice.randint(1, 30) for _ in range(3))
    yield gather_tree(*sizes, choice.choice((torch.int32, torch.int64)))()


# --- Decoder-only models --------------------------------------------------------------------------


@KINDS.add(100)
def causal_steps(choice: random.Random, number: int) -> Parts:
    """Every architecture: several prompts in one step, then token by token, as beams go on."""
    weight_format = choice.choice(FORMATS)
    model = packed(*choice.choice(CASES), weight_format)
    if choice.random() < 0.1:
        model = wide(weight_format)
    dtype = choice.choice(("float32", "float32", "bfloat16", "int8"))
    caches = new_caches(model, 4, max_rows=choice.choice((3, 37, 512)), dtype=dtype)
    sequences = choice.sample(range(4), choice.randint(1, 4))
    for place in range(4):
        entries = []
        for i in sequences:
            length = choice.randint(1, 3 if place else 60)
            tokens = random_tokens(length, number + 4 * place + i)
            entries.append(Entry(i, tokens, is_prompt=place == 0))
        yield step(caches, *entries)
        if place == 1:
            caches.reorder(torch.tensor([choice.choice(sequences) for _ in range(4)]))
            sequences = list(range(4))
    yield state(caches)


@functools.cache
def _mixing(name: str, norm: bool, weight_format: str) -> PackedCausalModel:
    return PackedCausalModel(*model_with(MIXERS[name], norm=norm), weight_format)


@KINDS.add(15)
def mamba2(choice: random.Random, number: int) -> Parts:
    """Sizes around what vectors and tasks have, and every switch."""
    model = _mixing(choice.choice(list(MIXERS)), choice.random() < 0.5, choice.choice(FORMATS))
    caches, text = new_caches(model), random_tokens(choice.randint(1, 70), number)
    yield prompt_logits(caches, text)
    yield generated_logits(caches, text[:5])
    yield state(caches)


@functools.cache
def _model_of_file(kind: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder, "model.gguf"), model_of(random_config("llama", "plain", **WIDE))
        write_model(path, model, kinds=lambda name: kind)
        return lmdecode.Decoding.from_pretrained(path, None).decoder


@KINDS.add(30)
def blocks_of_files(choice: random.Random, number: int) -> Parts:
    """Models whose matrices, or whose experts, are blocks of GGUF files as they are."""
    kind = choice.choice(list(BLOCKS))
    has_experts = choice.random() < 0.5
    model = model_with_experts("qwen3_moe", kind) if has_experts else _model_of_file(kind)
    caches, text = new_caches(model), random_tokens(choice.randint(1, 40), number)
    yield prompt_logits(caches, text)
    yield generated_logits(caches, text[:3])


@functools.cache
def _causal(architecture: str, variant: str, weight_format: str) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model(architecture, variant), weight_format)


@KINDS.add(15)
def generate(choice: random.Random, number: int) -> Parts:
    options: dict[str, Any] = {
        "max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True,
        "do_sample": False, "num_beams": choice.choice((1, 1, 4)),
    }  # fmt: skip
    if choice.random() < 0.3:
        options |= {"do_sample": True, "num_beams": 1, "seed": number, "top_k": 20, "top_p": 0.9}
    decoding = _causal(*choice.choice(CASES), choice.choice(FORMATS))
    yield decoding.generate(**ragged(number, choice.randint(1, 4)), **options)


@KINDS.add(15)
def engine(choice: random.Random, number: int) -> Parts:
    """Requests of every kind that share steps."""
    decoding = _causal(*choice.choice(ENGINES), choice.choice(FORMATS))
    running = decoding.engine(max_requests=4, capacity=engine_cases.CAPACITY)
    begins, requests = [random_tokens(30, seed).tolist() for seed in range(2)], []
    for _ in range(4):
        prompt = engine_cases.prompt_of(choice, begins)
        requests.append(running.submit(prompt, **engine_cases.options_of(choice)))
        for _ in range(choice.randint(0, 3)):
            running.step()
    while running.has_work:
        running.step()
    yield [engine_cases.outcome(request.result()) for request in requests]
