"""Vectors of texts: those of transformers, with the same bits in any batch, on any threads."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lmdecode
from lmdecode.decoder import embedding
from lmdecode.linear.formats import FORMATS
from tests.decoder.decoder_models import make_model
from tests.support.causal_models import random_model, random_tokens
from tests.support.gguf_files import gguf, write_model

KJV = Path(__file__).resolve().parents[2] / "examples/kjv_mistral/model"
LENGTHS = (1, 2, 9, 5, 40, 3, 130, 17)
TEXTS = [random_tokens(length, seed).tolist() for seed, length in enumerate(LENGTHS)]


def expected(model: Any, tokens: list[int], pooling: str) -> Tensor:
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([tokens])).last_hidden_state[0].double()
    return hidden[-1] if pooling == "last" else hidden.mean(0)


# Windows, states and scaled embeddings besides what Qwen3 and Llama have.
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "gpt2", "lfm2"])
def test_they_are_those_of_transformers(architecture: str, pooling: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(embedding, "_MOST_ROWS", 64)  # some are read in parts
    model = random_model(
        architecture, "convolutions at the ends" if architecture == "lfm2" else "plain"
    )
    decoding = lmdecode.Decoding.from_pretrained(model)
    found = decoding.embed(TEXTS, pooling=pooling)
    plain = decoding.embed(TEXTS, pooling=pooling, normalize=False)
    short = decoding.embed(TEXTS, pooling=pooling, dimensions=10)
    assert found.shape == plain.shape == (len(TEXTS), decoding.config.model_size)
    assert found.dtype == plain.dtype == torch.float32
    for i, tokens in enumerate(TEXTS):
        want = expected(model, tokens, pooling)
        torch.testing.assert_close(plain[i].double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[i].double(), F.normalize(want, dim=0), rtol=0, atol=1e-5)
        of_ten = F.normalize(want[:10], dim=0)
        torch.testing.assert_close(short[i].double(), of_ten, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_vector_has_the_same_bits_in_any_company(
    architecture: str, dtype: str, pooling: str, monkeypatch: Any
) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model(architecture, "plain"), dtype=dtype)
    texts = TEXTS * 8
    alone = torch.cat([decoding.embed([text], pooling=pooling) for text in TEXTS]).repeat(8, 1)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for batch in (2, 7, 64):
                parts = [texts[at : at + batch] for at in range(0, len(texts), batch)]
                found = torch.cat([decoding.embed(part, pooling=pooling) for part in parts])
                assert torch.equal(found, alone)
            for rows in (16, 100):  # long ones are read in parts
                with monkeypatch.context() as patched:
                    patched.setattr(embedding, "_MOST_ROWS", rows)
                    assert torch.equal(decoding.embed(TEXTS, pooling=pooling), alone[:8])
    finally:
        torch.set_num_threads(threads)


# Windows, whose first blocks are dropped, and states.
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "lfm2"])
def test_logits_of_texts_that_begin_alike(architecture: str, dtype: str, monkeypatch: Any) -> None:
    """What they share is read once, and each has the bits that it has alone."""
    model = random_model(
        architecture, "convolutions at the ends" if architecture == "lfm2" else "plain"
    )
    decoding = lmdecode.Decoding.from_pretrained(model, dtype=dtype, cache_dtype="bfloat16")
    read, forward = list[int](), embedding.CausalCaches.forward

    def counted(self: Any, tokens: Tensor, *args: Any, **options: Any) -> Tensor:
        read.append(len(tokens))
        return forward(self, tokens, *args, **options)

    def logits(texts: list[list[int]]) -> Tensor:
        read.clear()
        return embedding.last_logits(decoding.decoder, "bfloat16", texts, [3, 50])

    monkeypatch.setattr(embedding.CausalCaches, "forward", counted)
    lengths = [length for length in LENGTHS if length < 100]
    for shared, saves in ((101, True), (32, True), (31, False), (0, False)):
        # No two go on with the same token.
        begin = random_tokens(shared, 9).tolist()
        texts = [[*begin, i, *random_tokens(length, i)] for i, length in enumerate(lengths)]
        texts = [[int(token) for token in text] for text in texts]
        alone = torch.cat([logits([text]) for text in texts])
        for rows in (512, 48):  # a long one is read in parts, and so is what they share
            with monkeypatch.context() as patched:
                patched.setattr(embedding, "_MOST_ROWS", rows)
                assert torch.equal(logits(texts), alone)
                once = shared * (len(texts) - 1) * saves
            if rows == 512:
                assert sum(read) == sum(map(len, texts)) - once
        if saves:  # one has no more than what they share
            assert torch.equal(logits([begin, *texts])[1:], alone)


def test_texts_are_read_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    decoding = lmdecode.Decoding.from_pretrained(KJV)
    tokenizer, texts = AutoTokenizer.from_pretrained(KJV), ["In the beginning", "And God said"]
    want = decoding.embed([tokenizer.encode(text) for text in texts])
    assert torch.equal(decoding.embed(texts), want)
    assert torch.equal(decoding.embed(texts[0]), want[:1]), "one text"
    mixed = decoding.embed([texts[0], tokenizer.encode(texts[1])], tokenizer=tokenizer)
    assert torch.equal(mixed, want)
    decoding.save(tmp_path / "saved")
    assert torch.equal(lmdecode.Decoding.load(tmp_path / "saved").embed(texts), want)


def test_none_and_a_model_of_a_gguf_file(tmp_path: Path) -> None:
    model = random_model("qwen3", "plain")
    write_model(tmp_path / "m.gguf", model, lambda w: w.add_pooling_type(gguf.PoolingType.LAST))
    decoding = lmdecode.Decoding.from_pretrained(tmp_path / "m.gguf")
    want = lmdecode.Decoding.from_pretrained(model).embed(TEXTS)
    torch.testing.assert_close(decoding.embed(TEXTS), want, rtol=0, atol=1e-5)
    assert decoding.embed([], dimensions=3).shape == (0, 3)
    with pytest.raises(
        ValueError, match=r"embed: tokenizer is None; expected one, or .*m\.gguf has"
    ):
        decoding.embed(["no tokenizer"])


OLD = {"word_embedding_dimension": 32, "include_prompt": True, "pooling_mode_mean_tokens": False}
POOLINGS: list[tuple[Any, str]] = [
    *zip(gguf.PoolingType, ("none", "mean", "cls", "last", "rank"), strict=True),
    (17, "17"), ({"pooling_mode": "lasttoken"}, "last"), ({"pooling_mode": ["mean"]}, "mean"),
    ({"pooling_mode": "cls"}, "cls"), ({"pooling_mode": ["max", "mean"]}, "max+mean"),
    ({**OLD, "pooling_mode_lasttoken": True}, "last"), ({**OLD}, "mean"),
    ({**OLD, "pooling_mode_mean_tokens": True}, "mean"),
    ({**OLD, "pooling_mode_cls_token": True}, "cls"),
    ({**OLD, "pooling_mode_weightedmean_tokens": True}, "weightedmean"),
    ({**OLD, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max+mean"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "word"), POOLINGS)
def test_pooling_is_what_the_files_of_a_model_say(tmp_path: Path, said: Any, word: str) -> None:
    path, texts = tmp_path / "m.gguf", TEXTS[:3]
    if isinstance(said, dict):
        path = tmp_path / "m"
        random_model("qwen3", "plain").save_pretrained(path)
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling/config.json").write_text(json.dumps(said))
    else:
        model = random_model("qwen3", "plain")
        write_model(path, model, lambda w: w.add_uint32("qwen3.pooling_type", said))
    lmdecode.Decoding.from_pretrained(path).save(tmp_path / "saved")
    decodings = [lmdecode.Decoding.from_pretrained(path)]
    decodings += [lmdecode.Decoding.load(tmp_path / "saved") for _ in range(2)]
    assert decodings[2].model is not None
    for decoding in decodings:
        if word in ("last", "mean"):
            want = decoding.embed(texts, pooling=word)
            assert torch.equal(decoding.embed(texts), want)
        else:
            message = rf"^Decoding.embed: pooling is None, .* say '{re.escape(word)}'; expected"
            with pytest.raises(ValueError, match=message):
                decoding.embed(texts)
    others = [decoding.embed(texts, pooling="last") for decoding in decodings]
    assert torch.equal(others[0], others[1]) and torch.equal(others[0], others[2])
    assert not torch.equal(others[0], decodings[0].embed(texts, pooling="mean"))


@pytest.mark.parametrize("text", ["{", "[]", '{"pooling_mode": [3]}'])
def test_a_damaged_file_of_pooling_is_named(tmp_path: Path, text: str) -> None:
    random_model("qwen3", "plain").save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(text)
    decoding = lmdecode.Decoding.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json does not say how vectors"):
        decoding.embed(TEXTS)
    assert decoding.embed(TEXTS, pooling="last").shape == (len(TEXTS), 32)


def test_a_folder_whose_tensors_have_no_prefix(tmp_path: Path) -> None:
    """As Qwen3-Embedding's: the base model's names, and no head."""
    model = random_model("qwen3", "plain")
    model.base_model.save_pretrained(tmp_path)
    found = lmdecode.Decoding.from_pretrained(tmp_path).embed(TEXTS)
    assert torch.equal(found, lmdecode.Decoding.from_pretrained(model).embed(TEXTS))


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        (3, {}, TypeError, "texts is of type int; expected a list of texts, or of lists"),
        ([3], {}, TypeError, r"texts\[0\] is of type int; expected a list of tokens"),
        ([[1], [1, 2.5]], {}, TypeError, r"texts\[1\] is of type list; expected a list of tokens"),
        ([[1], []], {}, ValueError, r"texts\[1\] has 0 tokens; expected 1 to 256"),
        ([[1] * 257], {}, ValueError, r"texts\[0\] has 257 tokens; expected 1 to 256"),
        ([[1], [5, 101]], {}, ValueError, r"texts\[1\] has tokens 5 to 101; expected 0 to 100"),
        ([[-1]], {}, ValueError, r"texts\[0\] has tokens -1 to -1; expected 0 to 100"),
        (["a"], {}, ValueError, r"tokenizer is None; expected .* \(the model came without"),
        (["a"], {"tokenizer": 3}, TypeError, "tokenizer is of type int; expected one with encode"),
        ([[1]], {"pooling": "cls"}, ValueError, "pooling is 'cls'; expected"),
        ([[1]], {"pooling": 3}, ValueError, "pooling is 3; expected"),
        ([[1]], {"normalize": 1}, TypeError, "normalize is of type int; expected a bool"),
        ([[1]], {"dimensions": 0}, ValueError, "dimensions is 0; expected 1 to 32"),
        ([[1]], {"dimensions": 33}, ValueError, "dimensions is 33; expected 1 to 32"),
        ([[1]], {"dimensions": 1.5}, TypeError, "dimensions is of type float; expected"),
    ],
)
def test_wrong_arguments(
    texts: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    decoding = lmdecode.Decoding.from_pretrained(random_model("gpt2", "plain"))
    with pytest.raises(error, match=f"^Decoding.embed: {message}"):
        decoding.embed(texts, **options)


def test_models_that_have_no_vectors() -> None:
    decoding = lmdecode.Decoding.from_pretrained(make_model("marian"))
    with pytest.raises(ValueError, match="has a PackedDecoder; expected a decoder-only model"):
        decoding.embed([[1]])
    model = copy.deepcopy(random_model("llama", "plain"))
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(RuntimeError, match="features have NaN"):
        lmdecode.Decoding.from_pretrained(model).embed([[5]])
