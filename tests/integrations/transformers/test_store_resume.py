"""Processes that are killed while they answer: another one goes on, to the last bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmdecode.store")

import transformers
from store_models import SHIPPED, answer, ids, model_of, store_of

from lmdecode.integrations.transformers import sample
from tests.support.store_faults import kill_behind

_ANSWER = 48
_KILLED_AFTER = 21

_CHILD = """
import torch
torch.set_num_threads(1)
from test_store_resume import build, prompt_of, settings
from store_models import answer, store_of
from tests.support.store_faults import Progress
model = build({name!r}, {dtype})
with store_of(model, __import__("pathlib").Path({store!r}), **settings({name!r})) as store:
    answer(model, store, "chat", prompt_of({name!r}), streamer=Progress(), **{options!r})
"""


def build(name: str, dtype: torch.dtype) -> Any:
    if name != "shipped":
        return model_of(name, dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=dtype).eval()


def prompt_of(name: str) -> torch.Tensor:
    # Of the shipped model, longer than its window of 128.
    return ids(150 if name == "shipped" else 37)


def settings(name: str) -> dict[str, Any]:
    return {"chunk_tokens": None} if name == "shipped" else {}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the child: with another number of threads, sums are made in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    [
        *(
            pytest.param(
                "shipped", dtype, way,
                marks=[
                    pytest.mark.skipif(not SHIPPED.exists(), reason="in source checkouts only"),
                    pytest.mark.slow,
                ],
            )
            for dtype in (torch.float32, torch.bfloat16)
            for way in ("greedy", "sampled")
        ),
        ("llama", torch.float32, "sampled"),
        pytest.param("gemma2", torch.bfloat16, "greedy", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_killed_while_it_answers(name: str, dtype: torch.dtype, way: str, tmp_path: Path) -> None:
    model, prompt = build(name, dtype), prompt_of(name)
    length = {"max_new_tokens": _ANSWER, "min_new_tokens": _ANSWER}
    options: dict[str, Any] = {"prefill_chunk_size": 32, "commit_every": 5}
    if way == "sampled":
        options.update(do_sample=True, top_p=0.9, temperature=0.9)
    loop = {"seed": 5, "custom_generate": sample} if way == "sampled" else {}
    with store_of(model, tmp_path / "whole", **settings(name)) as store:
        tokens, logits = answer(model, store, "chat", prompt, **options, **length, **loop)

    code = _CHILD.format(
        name=name, dtype=dtype, store=str(tmp_path / "killed"), options={**options, **length}
    )  # fmt: skip
    if way == "sampled":
        code = code.replace(
            "streamer=Progress()",
            "streamer=Progress(), seed=5, custom_generate="
            "__import__('lmdecode.integrations.transformers', fromlist=['']).sample",
        )
    kill_behind(_KILLED_AFTER, code, Path(__file__).parent)

    with store_of(model, tmp_path / "killed", **settings(name)) as store:
        said = store.session("chat").tokens
        assert store.session("chat").resume()[0] >= min(len(said), prompt.shape[1]) - 1
        said = said or prompt[0].tolist()  # a disk that is slower than all that
        kept = len(said) - prompt.shape[1]
        assert 0 <= kept <= _ANSWER
        assert said == tokens[: len(said)]
        rest = {"max_new_tokens": _ANSWER - kept, "min_new_tokens": _ANSWER - kept}
        again, others = answer(
            model, store, "chat", torch.tensor([said]), **options, **rest, **loop
        )
        assert again == tokens
        assert torch.equal(others, logits[kept:])
        # Asked from the beginning by somebody who saw nothing: the prompt is there.
        again, others = answer(model, store, "other", prompt, **options, **length, **loop)
        assert again == tokens
        assert torch.equal(others, logits)
        assert store.verify().damage == ()
