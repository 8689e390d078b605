"""``/v1/embeddings``, by the official client, and ``/v1/rerank``."""

import base64
import functools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

openai = pytest.importorskip("openai")
tokenizers = pytest.importorskip("tokenizers")

from lmdecode.serving.text_model import TextModel  # noqa: E402
from tests.serving.servers import KJV, NAME, load_model, post, served  # noqa: E402
from tests.support.causal_models import model_of, random_config  # noqa: E402

TEXTS = ["In the beginning God created the heaven and the earth.", "And God said", "the LORD"]


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load_model()


@pytest.fixture(scope="module")
def port(model: TextModel) -> Iterator[int]:
    with served(model, max_waiting=4) as port:
        yield port


@pytest.fixture(scope="module")
def create(port: int) -> Iterator[Any]:
    base_url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield functools.partial(client.embeddings.create, model=NAME)


def test_the_official_client(model: TextModel, create: Any) -> None:
    tokens = [model.tokenizer.encode(text) for text in TEXTS]
    want = model.decoding.embed(tokens)
    for given in (TEXTS, tokens):
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            got = create(input=given, user="u", **options)
            assert [item.index for item in got.data] == [0, 1, 2] and got.model == NAME
            assert got.usage.prompt_tokens == got.usage.total_tokens == sum(map(len, tokens))
            for item, vector in zip(got.data, want, strict=True):
                values = item.embedding
                if isinstance(values, str):  # as it is asked for
                    data = bytearray(base64.b64decode(values))
                    values = torch.frombuffer(data, dtype=torch.float32).tolist()
                assert torch.equal(torch.tensor(values), vector), "the same bits"
    for one in (TEXTS[0], tokens[0]):
        (item,) = create(input=one).data
        assert torch.equal(torch.tensor(item.embedding), want[0])
    short = create(input=TEXTS[1], dimensions=8, extra_body={"pooling": "mean"}).data[0].embedding
    mean = model.decoding.embed(tokens[1:2], dimensions=8, pooling="mean")[0]
    assert torch.equal(torch.tensor(short), mean)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_pooling_is_what_the_models_files_say(tmp_path: Path, mode: str) -> None:
    shutil.copytree(KJV, tmp_path / "m")
    (tmp_path / "m/1_Pooling").mkdir()
    (tmp_path / "m/1_Pooling/config.json").write_text(json.dumps({"pooling_mode": mode}))
    model = TextModel.load(tmp_path / "m", dtype="float32", name=NAME)
    with served(model) as port:
        status, found = post(port, "/v1/embeddings", {"input": TEXTS[0]})
        if mode == "cls":
            assert status == 400 and found["error"]["param"] == "pooling"
            message = "pooling is None, and the model's files say 'cls'; expected 'last' or 'mean'"
            assert found["error"]["message"] == message
            _, found = post(port, "/v1/embeddings", {"input": TEXTS[0], "pooling": "mean"})
        tokens = [model.tokenizer.encode(TEXTS[0])]
        want = model.decoding.embed(tokens, pooling="mean")[0]
        assert torch.equal(torch.tensor(found["data"][0]["embedding"]), want)


def test_many_inputs_and_answers_beside_them(model: TextModel, create: Any, port: int) -> None:
    """More inputs than the engine has places and room; chats go on meanwhile."""
    texts = [f"{TEXTS[i % 3]} {i}" for i in range(300)]
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(create(input=texts)))
    asking.start()
    body = {"prompt": "And God said", "max_tokens": 8, "seed": 1}
    answers = {json.dumps(post(port, "/v1/completions", body)[1]["choices"]) for _ in range(3)}
    asking.join()
    assert len(answers) == 1
    want = model.decoding.embed([model.tokenizer.encode(text) for text in texts])
    assert torch.equal(torch.tensor([item.embedding for item in found[0].data]), want)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("embeddings", {}, "input", "input is None; expected a text, a list of tokens, or a list"),
        ("embeddings", {"input": []}, "input", "input is []; expected a text"),
        ("embeddings", {"input": 3}, "input", "input is 3; expected a text"),
        ("embeddings", {"input": [1, "a"]}, "input", "expected texts, or token ids, 0 to"),
        ("embeddings", {"input": [[1, -1]]}, "input", "expected texts, or token ids, 0 to"),
        ("embeddings", {"input": ["a", 3]}, "input", "input is ['a', 3]; expected a text"),
        ("embeddings", {"input": ["a", []]}, "input", "input[1] is empty; expected at least one"),
        ("embeddings", {"input": ["a"] * 2049}, "input", "a list of either, up to 2048"),
        ("embeddings", {"input": [[5], [5] * 514]}, "input",
         "input[1] has 514 tokens; expected at most 513 tokens, the model's context"),
        ("embeddings", {"input": ["a", "b" * 100_000]}, "input",
         "input[1] has 100000 characters; expected at most 513 tokens, the model's context"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format",
         "encoding_format is 'int8'; expected 'float' or 'base64'"),
        ("embeddings", {"input": "a", "dimensions": 100_000}, "dimensions",
         "dimensions is 100000; expected an int, 1 to"),
        ("embeddings", {"input": "a", "pooling": "cls"}, "pooling",
         "pooling is 'cls'; expected 'last' or 'mean'"),
        ("embeddings", {"input": "a", "stream": True}, "stream", "stream is no field of this"),
        ("rerank", {"documents": ["a"]}, "query", "query is None; expected a text"),
        ("rerank", {"query": "a"}, "documents", "documents is None; expected a list of 1 to 2048"),
        ("rerank", {"query": "a", "documents": []}, "documents", "documents is []; expected"),
        ("rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, "documents",
         "documents[1] is no text; expected a list of 1 to 2048 texts, or of objects with a text"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "top_n is 0; expected"),
        ("rerank", {"query": "a", "documents": ["a"], "n": 1}, "n", "n is no field of this"),
        ("rerank", {"query": "a", "documents": ["a"]}, "model",
         "the tokenizer lacks <|im_start|>, yes or no; expected a reranker of Qwen3's"),
    ],
)  # fmt: skip
def test_wrong_bodies(port: int, path: str, body: Any, param: str, message: str) -> None:
    status, found = post(port, f"/v1/{path}", body)
    assert (status, found["error"]["param"]) == (400, param)
    assert found["error"]["type"] == "invalid_request_error"
    assert message in found["error"]["message"]


# --- a model of Qwen3-Reranker's kind ------------------------------------------------------------


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: Any) -> Path:
    from transformers import PreTrainedTokenizerFast

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    pieces = [*letters, *("".join(pair) for pair in merges)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder: Path = tmp_path_factory.mktemp("reranker")
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    config = random_config("qwen3", "plain", vocab_size=270, max_position_embeddings=1024)
    model_of(config).save_pretrained(folder)
    return folder


PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
DOCUMENTS = ["Noah built an ark.", "no", "Cain slew Abel.", "The ark rested upon Ararat."]


def plain_scores(folder: Path, query: str, instruction: str = DEFAULT) -> list[float]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    scores = []
    for document in DOCUMENTS:
        text = PROMPT.format(instruction=instruction, query=query, document=document)
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1, answers]
        scores.append(float(logits.double().softmax(-1)[1]))
    return scores


def test_rerank(reranker: Path) -> None:
    model = TextModel.load(reranker, dtype="float32", name=NAME)
    engine = model.decoding.engine(max_requests=2, capacity=1023)
    from lmdecode.serving.app import create_app
    from tests.serving.servers import serving

    with serving(create_app(engine, model)) as port:
        asked: dict[str, Any] = {"model": NAME, "query": "Who built it?", "documents": DOCUMENTS}
        status, found = post(port, "/v1/rerank", asked)
        want = plain_scores(reranker, "Who built it?")
        order = sorted(range(4), key=lambda i: -want[i])
        assert status == 200 and [item["index"] for item in found["results"]] == order
        for item in found["results"]:
            assert set(item) == {"index", "relevance_score"}
            assert item["relevance_score"] == pytest.approx(want[item["index"]], abs=1e-5)
        assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] > 1000
        objects = [{"text": text} for text in DOCUMENTS]
        more = {"documents": objects, "top_n": 2, "return_documents": True}
        _, best = post(port, "/v1/rerank", {**asked, **more})
        assert best["results"] == [
            {**item, "document": objects[item["index"]]} for item in found["results"][:2]
        ], "the same bits"
        _, alone = post(port, "/v1/rerank", {**asked, "documents": DOCUMENTS[order[0] :][:1]})
        assert alone["results"][0]["relevance_score"] == found["results"][0]["relevance_score"]
        _, other = post(port, "/v1/rerank", {**asked, "instruction": "Find the murderer"})
        want = plain_scores(reranker, "Who built it?", "Find the murderer")
        assert {item["index"]: item["relevance_score"] for item in other["results"]} == {
            i: pytest.approx(score, abs=1e-5) for i, score in enumerate(want)
        }
        status, found = post(port, "/v1/rerank", {**asked, "documents": ["a", "b" * 900]})
        assert status == 400 and "documents[1] has " in found["error"]["message"]
        assert found["error"]["code"] == "context_length_exceeded"
    engine.stop()
