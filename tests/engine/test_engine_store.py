"""An ``Engine`` with a store: prompts are found by another engine, in the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode import KVStore
from lmdecode.store import FingerprintMismatchError
from tests.engine.engine_cases import CAPACITY, greedy, is_whole, outcome, run
from tests.support.causal_models import random_model, random_tokens

MODELS = {
    "llama": ("llama", "plain"),
    "windows": ("gemma2", "plain"),
    "two sizes of heads": ("gemma4_text", "shared keys, inputs of layers"),
    "convolutions": ("lfm2", "convolutions at the ends"),
    "delta rule": ("qwen3_5_text", "delta rule last, biases"),
    "Mamba-2": ("granitemoehybrid", "experts, multipliers"),
    "Mamba-2 beside attention": ("falcon_h1", "norm before the gate, tied"),
}


@pytest.fixture(scope="module", params=MODELS)
def decoding(request: pytest.FixtureRequest) -> lmdecode.Decoding:
    return lmdecode.Decoding.from_pretrained(random_model(*MODELS[request.param]))


def opened(decoding: lmdecode.Decoding, path: Path) -> KVStore:
    return KVStore(
        path / "store", capacity_bytes=1 << 26, fingerprint=decoding.fingerprint(), chunk_tokens=16
    )


def engine_of(decoding: lmdecode.Decoding, store: Any) -> lmdecode.Engine:
    return decoding.engine(max_requests=4, capacity=CAPACITY, max_step_tokens=20, store=store)


OPTIONS: list[dict[str, Any]] = [{}, {"seed": 3, "temperature": 1.5}, {"num_beams": 3}]


def test_a_prompt_is_found_by_another_engine(decoding: lmdecode.Decoding, tmp_path: Path) -> None:
    prompt = random_tokens(80, 0).tolist()
    plain = engine_of(decoding, None)
    want = [
        outcome(plain.submit(prompt, max_new_tokens=10, **options).result()) for options in OPTIONS
    ]
    for turn in range(2):
        with opened(decoding, tmp_path) as store:
            engine = engine_of(decoding, store)
            requests = [engine.submit(prompt, max_new_tokens=10, **o) for o in OPTIONS]
            run(engine, *requests)
            engine.stop()  # waits for what is being written
            assert [outcome(request.result()) for request in requests] == want
            assert requests[0].stats.cached_tokens >= (64 if turn else 0)
            assert engine.stats.prompt_tokens < (20 if turn else 90) and is_whole(engine)


def test_a_prompt_with_nan_is_not_kept(tmp_path: Path) -> None:
    model = copy.deepcopy(random_model("llama", "plain"))
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    broken = lmdecode.Decoding.from_pretrained(model)
    prompt = random_tokens(64, 0).clamp(min=4).tolist()
    with opened(broken, tmp_path) as store:
        engine = engine_of(broken, store)
        failed = engine.submit([*prompt[:-1], 3], max_new_tokens=3)
        with pytest.raises(RuntimeError, match="NaN"):
            failed.result()
        engine.stop()
        assert store.stats()["entries"] == 0
        engine.submit(prompt, max_new_tokens=3).result()
        engine.stop()
        assert store.stats()["entries"] > 0


def test_the_longest_of_what_there_is(decoding: lmdecode.Decoding, tmp_path: Path) -> None:
    system = random_tokens(64, 0).tolist()
    prompts = [[*system, *random_tokens(n, n).tolist()] for n in (1, 33, 20)]
    with opened(decoding, tmp_path) as store:
        for prompt in (prompts[0], prompts[1], prompts[1], prompts[2]):
            engine = engine_of(decoding, store)
            request = engine.submit(prompt, max_new_tokens=5, eos_token_id=())
            assert request.result().tokens == greedy(decoding, prompt, 5)
            engine.stop()
    assert request.stats.cached_tokens in (64, 80, 84, 0)


@pytest.mark.parametrize("kind", ["convolutions", "delta rule"])
def test_a_beginning_is_found_at_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """Layers with a state: several prompts at once, which others begin with in another engine."""
    decoding = lmdecode.Decoding.from_pretrained(random_model(*MODELS[kind]))
    system = random_tokens(600, 0).tolist()
    prompts = [[*system, *random_tokens(n, n).tolist()] for n in (9, 60)]
    others = [[*system, *random_tokens(30, 30).tolist()], [*system[:300], *prompts[1]]]
    for turn, asked in enumerate((prompts, others)):
        with opened(decoding, tmp_path) as store:
            engine = decoding.engine(max_requests=4, capacity=1000, store=store)
            requests = [engine.submit(p, max_new_tokens=5, eos_token_id=()) for p in asked]
            run(engine, *requests)
            for prompt, request in zip(asked, requests, strict=True):
                ids = torch.tensor([prompt])
                whole = decoding.generate(ids, max_new_tokens=5, eos_token_id=None)
                assert [*prompt, *request.result().tokens] == whole[0].tolist()
            engine.stop()
            assert is_whole(engine) and store.verify().damage == ()
            if turn == 0:
                assert [store.lookup(system[:n]).num_tokens for n in (599, 300)] == [512, 256]
            else:
                assert [request.stats.cached_tokens for request in requests] == [512, 256]


def test_a_store_that_fails_is_a_warning(
    decoding: lmdecode.Decoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(80, 0).tolist()
    store = opened(decoding, tmp_path)
    engine = engine_of(decoding, store)
    store.close()
    with pytest.warns(RuntimeWarning, match="Engine goes on without the store"):
        request = engine.submit(prompt, max_new_tokens=5, eos_token_id=())
        assert request.result().tokens == greedy(decoding, prompt, 5)
    assert is_whole(engine)


def test_what_is_refused(decoding: lmdecode.Decoding, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^Decoding.engine: store is .*expected a KVStore"):
        engine_of(decoding, "store")
    other = lmdecode.Decoding.from_pretrained(random_model("llama", "plain"), torch.bfloat16)
    with (
        opened(other, tmp_path) as store,
        pytest.raises(
            FingerprintMismatchError, match=r"^Decoding.engine: the store has another fingerprint"
        ),
    ):
        engine_of(decoding, store)
