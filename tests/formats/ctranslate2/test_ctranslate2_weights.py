"""Weights of converted models: those of the original, or what their quantization made of them."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lmdecode
from lmdecode.formats.ctranslate2 import open_folder
from tests.decoder.decoder_models import make_inputs
from tests.formats.ctranslate2.converted_models import (
    CAUSAL,
    QUANTIZATIONS,
    SEQ2SEQ,
    converted,
    original,
    whisper_words,
    words_of,
)
from tests.support.causal_models import random_tokens

# The rows before the first position, which transformers has for no token.
UNUSED_ROWS = {"bart": 2, "m2m_100": 2, "mbart": 2}


def quantized(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Return weights [rows, ...] through CTranslate2's int8 or int16, by numpy alone."""
    weights = value.numpy().astype(np.float32)
    rows = weights.reshape(len(weights), -1)
    if kind == "int16":
        scale = np.float32(2**10 / np.abs(rows).max())
        return torch.from_numpy(np.rint(weights * scale) * (np.float32(1) / scale))
    most = np.abs(rows).max(axis=1)
    most[most == 0] = 127
    scale = (np.float32(127) / most)[:, None]
    return torch.from_numpy((np.rint(rows * scale) * (np.float32(1) / scale)).reshape(value.shape))


def expected(name: str, value: torch.Tensor, kind: str, is_quantized: bool) -> torch.Tensor:
    if is_quantized and kind.startswith("int"):
        return quantized(value, kind)
    floats = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return value.to(floats.get(kind.removeprefix("int8_"), torch.float32))


def named(model: Any) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | {n: b for n, b in model.named_buffers() if n.endswith("embed_positions.weights")}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kind", [*SEQ2SEQ, "whisper", *CAUSAL])
def test_weights(kind: str, quantization: str, root: Path) -> None:
    """Matrices of integers are those of linear layers, embeddings and convolutions."""
    source = open_folder(converted(kind, root, quantization))
    names = named(original(kind))
    assert names.keys() == source.parts.keys() - {"final_logits_bias"}
    fused = ("q_proj", "k_proj", "v_proj", ".q.", ".k.", ".v.", "c_attn", "qkv")
    for name, value in names.items():
        got, value = source.read(name), value.detach()
        is_matrix = value.dim() > 1 and "positions" not in name and "wpe" not in name
        is_matrix = is_matrix and "relative_attention_bias" not in name
        begin = UNUSED_ROWS.get(kind, 0) if "positions" in name else 0
        if quantization == "int16" and any(part in name for part in fused):
            continue  # the largest of all three makes the scale
        is_conv1d = kind == "gpt2" and is_matrix and ".h." in name
        value = value.T if is_conv1d else value
        want = expected(name, value, quantization, is_matrix)
        want = want.T if is_conv1d else want
        if kind == "gemma" and "norm" in name:
            want = want.float() + 1  # it is read as a Granite
        assert got.dtype == want.dtype, name
        assert torch.equal(got[begin:], want[begin:]), name


@pytest.mark.parametrize("kind", [*SEQ2SEQ, "whisper"])
def test_a_model_has_the_weights_of_its_file(kind: str, root: Path) -> None:
    """In float32, tied as the file has them."""
    folder = converted(kind, root, "int8_float16")
    source, model = open_folder(folder), lmdecode.Decoding.from_pretrained(folder).model
    for name, value in named(model).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, source.read(name).float()), name
    tied = model.get_output_embeddings().weight is model.get_decoder().embed_tokens.weight
    before = original(kind)
    was = before.get_output_embeddings().weight is before.get_decoder().embed_tokens.weight
    assert tied == was


@pytest.mark.parametrize("quantization", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", ["marian", "t5", "llama", "gemma3", "gpt2"])
def test_a_quantized_folder_is_the_model_of_its_values(
    kind: str, quantization: str, root: Path
) -> None:
    """Packed in int8 or float32 they give the tokens that transformers' model of them gives."""
    folder = converted(kind, root, quantization)
    ids = torch.randint(4, 60, (1, 7), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    decoding = lmdecode.Decoding.from_pretrained(folder)
    model = type(decoding.model)(decoding.model.config).eval()
    model.generation_config = decoding.model.generation_config
    source = open_folder(folder)
    state = {name: source.read(name).float() for name in source.parts}
    if "final_logits_bias" in state:
        state["final_logits_bias"] = state["final_logits_bias"][None]
    model.load_state_dict(state, strict=False)
    assert decoding.generate(ids, **options).tolist() == model.generate(ids, **options).tolist()
    other = lmdecode.Decoding.from_pretrained(folder, "int8").generate(ids, **options)
    want = lmdecode.Decoding.from_pretrained(model, "int8").generate(ids, **options)
    assert other.tolist() == want.tolist()


ctranslate2 = pytest.importorskip("ctranslate2")

STEPS = 12
# CTranslate2 takes tokens out before it makes log-probabilities of logits, and ends sooner.
AS_TRANSFORMERS = {"renormalize_logits": False, "early_stopping": False}
START = 10  # of mBART, whose folders name none


def translations(kind: str, folder: Path, inputs: dict[str, Any], **options: Any) -> list[Any]:
    """Return what CTranslate2 finds, as tokens of ours."""
    words = words_of(original(kind))
    runner = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    sources = [
        [words[token] for token, seen in zip(row, mask, strict=True) if seen]
        for row, mask in zip(
            inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True
        )
    ]
    if kind == "mbart":
        options["target_prefix"] = [[words[START]]] * len(sources)
    numbers = {word: number for number, word in enumerate(words)}
    found = runner.translate_batch(sources, **options)
    return [[numbers[word] for word in each.hypotheses[0]] for each in found]


def as_converted(kind: str) -> Any:
    """Return a model as the converter takes it: transformers ties T5, so outputs are scaled."""
    model = original(kind)
    if kind in ("mt5", "t5_gated"):
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.get_decoder().final_layer_norm.weight *= model.config.d_model**-0.5
    return model


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_translations(kind: str, num_beams: int, root: Path) -> None:
    folder, inputs = converted(kind, root), make_inputs(kind)
    decoding = lmdecode.Decoding.from_pretrained(folder)
    options: dict[str, Any] = {"num_beams": num_beams, "min_new_tokens": STEPS}
    options |= {"max_new_tokens": STEPS}
    if kind == "mbart":
        options["decoder_start_token_id"] = START
    got = decoding.generate(**inputs, **options)
    theirs = translations(
        kind, folder, inputs, beam_size=num_beams, min_decoding_length=STEPS,
        max_decoding_length=STEPS,
    )  # fmt: skip
    assert got[:, -STEPS:].tolist() == [row[-STEPS:] for row in theirs]
    options["decoder_start_token_id"] = got[0, 0].item()
    want = as_converted(kind).generate(**inputs, **options, forced_eos_token_id=None)
    options |= AS_TRANSFORMERS
    assert decoding.generate(**inputs, **options).tolist() == want.tolist()


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_translations_that_end(kind: str, root: Path) -> None:
    folder, inputs = converted(kind, root), make_inputs(kind, batch=6)
    decoding = lmdecode.Decoding.from_pretrained(folder)
    end = decoding.model.config.eos_token_id
    start = {"decoder_start_token_id": START} if kind == "mbart" else {}
    got = decoding.generate(**inputs, min_new_tokens=1, max_new_tokens=30, num_beams=1, **start)
    theirs = translations(kind, folder, inputs, beam_size=1, max_decoding_length=30)
    rows = [row[1:] for row in got.tolist()]
    rows = [row[: row.index(end)] if end in row else row for row in rows]
    assert rows == [row[1:] if kind == "mbart" and row[:1] == [START] else row for row in theirs]


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("kind", [*CAUSAL, "opt"])
def test_continuations(kind: str, num_beams: int, root: Path) -> None:
    folder, model = converted(kind, root), original(kind)
    words, ids = words_of(model), random_tokens(6)
    options: dict[str, Any] = {"min_new_tokens": STEPS, "max_new_tokens": STEPS}
    options |= {"num_beams": num_beams, "do_sample": False}
    decoding = lmdecode.Decoding.from_pretrained(folder)
    want = model.generate(ids[None], **options).tolist()
    assert decoding.generate(ids[None], **options, **AS_TRANSFORMERS).tolist() == want
    got = decoding.generate(ids[None], **options)
    runner = ctranslate2.Generator(str(folder), compute_type="float32", intra_threads=1)
    found = runner.generate_batch(
        [[words[token] for token in ids.tolist()]], beam_size=num_beams, min_length=STEPS,
        max_length=STEPS, include_prompt_in_result=False,
    )  # fmt: skip
    assert got[0, 6:].tolist() == found[0].sequences_ids[0]


@pytest.mark.parametrize("num_beams", [1, 5])
def test_whisper(num_beams: int, root: Path) -> None:
    folder, model = converted("whisper", root), original("whisper")
    decoding = lmdecode.Decoding.from_pretrained(folder)
    features = torch.randn(2, 80, 200, generator=torch.Generator().manual_seed(4))
    options: dict[str, Any] = {"language": "de", "task": "translate", "num_beams": num_beams}
    options |= {"max_new_tokens": 20}
    want = model.generate(features, **options).tolist()
    assert decoding.generate(features, **options).tolist() == want
    # A Whisper has the rules of transformers, if not asked for others.
    got = decoding.generate(features, **options, renormalize_logits=True)
    runner = ctranslate2.models.Whisper(str(folder), compute_type="float32", intra_threads=1)
    words = whisper_words()
    prompt = ["<|startoftranscript|>", "<|de|>", "<|translate|>", "<|notimestamps|>"]
    found = runner.generate(
        ctranslate2.StorageView.from_array(features.numpy()),
        [[words.index(word) for word in prompt]] * 2,
        beam_size=num_beams,
        max_length=2 * 20,  # of prompt and text; it takes half of it for the text
    )
    rows = [[token for token in row if token != 50257] for row in got.tolist()]
    assert rows == [result.sequences_ids[0] for result in found]


def test_whisper_with_timestamps_and_a_language_that_is_found(root: Path) -> None:
    decoding = lmdecode.Decoding.from_pretrained(converted("whisper", root))
    model = original("whisper")
    features = torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(5))
    for options in ({"return_timestamps": True, "language": "en"}, {}):
        want = model.generate(features, num_beams=2, max_new_tokens=30, **options)
        got = decoding.generate(features, num_beams=2, max_new_tokens=30, **options)
        assert got.tolist() == want.tolist()
