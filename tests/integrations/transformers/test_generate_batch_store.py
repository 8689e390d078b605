"""Continuous batching with a store: prompts are found again, and the store may fail."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from window_models import VOCAB, build_window_model

from lmdecode.integrations.transformers import BatchingManager, generate_batch, generate_with_store
from lmdecode.store import Fingerprint, FingerprintMismatchError, KVStore

PAGE = 16


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_window_model("Llama")


@pytest.fixture(scope="module")
def fingerprint(llama: Any) -> Fingerprint:
    return Fingerprint.from_model(llama)


def opened(path: Path, fingerprint: Fingerprint, **options: Any) -> KVStore:
    options = {"capacity_bytes": 1 << 26, "chunk_tokens": 8, **options}
    return KVStore(path, fingerprint=fingerprint, **options)


def texts(count: int, length: int = 70) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, VOCAB, (count, length), generator=generator).tolist()


CONFIG = GenerationConfig(max_new_tokens=12, eos_token_id=-1, pad_token_id=0, do_sample=False)
BATCHING = ContinuousBatchingConfig(page_size=PAGE, num_blocks=64, max_batch_tokens=64)


class Computed:
    """Counts the tokens that a model computes."""

    def __init__(self, model: Any) -> None:
        self.tokens, self._model = 0, model

    def __enter__(self) -> Computed:
        layer = self._model.model.layers[0]
        self._hook = layer.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def _count(self, layer: Any, args: Any, kwargs: Any) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        self.tokens += states.shape[1]

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()


def run(model: Any, prompts: list[list[int]], batching: Any = BATCHING, **arguments: Any) -> Any:
    with Computed(model) as computed:
        outputs = generate_batch(model, prompts, CONFIG, batching, **arguments)
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs.values()], computed.tokens


def test_prompts_are_found_after_the_store_was_closed(tmp_path, llama, fingerprint):
    expected, all_tokens = run(llama, texts(6))
    with opened(tmp_path, fingerprint) as store:
        assert run(llama, texts(6), store=store) == (expected, all_tokens)
        assert store.stats()["hits"] == 0
    with opened(tmp_path, fingerprint) as store:
        got, tokens = run(llama, texts(6), store=store)
        assert got == expected
        # 70 tokens have 4 whole blocks of 16 that need not be computed
        assert tokens == all_tokens - 6 * 4 * PAGE
        assert store.stats()["hits"] == 6


def test_a_chat_goes_on_behind_its_answer(tmp_path, llama, fingerprint):
    with opened(tmp_path, fingerprint) as store:
        (answer,), _ = run(llama, texts(1), store=store)
        chat = texts(1)[0] + answer + [5, 6, 7]
        (expected,), all_tokens = run(llama, [chat])
        (got,), tokens = run(llama, [chat], store=store)
    assert got == expected
    # 81 tokens were computed of prompt and answer: 5 whole blocks
    assert tokens == all_tokens - 5 * PAGE


def test_generate_with_store_and_batches_share_what_they_store(tmp_path, llama, fingerprint):
    (prompt,) = texts(1)
    ids = torch.tensor([prompt])
    with opened(tmp_path / "a", fingerprint) as store:
        alone = generate_with_store(llama, store, None, ids, generation_config=CONFIG)
        (got,), tokens = run(llama, [prompt], store=store)
        assert got == alone[0, len(prompt) :].tolist()
        assert tokens == len(prompt) - 4 * PAGE + CONFIG.max_new_tokens - 1
    with opened(tmp_path / "b", fingerprint) as store:
        run(llama, [prompt], store=store)
        with Computed(llama) as computed:
            again = generate_with_store(llama, store, None, ids, generation_config=CONFIG)
        assert torch.equal(again, alone)
        # 69 tokens are found: all but the last one
        assert computed.tokens == 1 + CONFIG.max_new_tokens - 1


@pytest.mark.parametrize("num_blocks", [7, 10, 20])
@pytest.mark.parametrize("max_batch_tokens", [16, 64])
def test_few_blocks(tmp_path, llama, fingerprint, num_blocks, max_batch_tokens):
    """Requests wait, and are put back: what is loaded for one may have to go for another."""
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens
    )
    prompts = texts(8)
    prompts += [prompts[0][:40] + prompts[1][40:], prompts[0][:33], prompts[2]]
    expected, _ = run(llama, prompts)
    with opened(tmp_path, fingerprint) as store:
        for _ in range(2):
            assert run(llama, prompts, batching, store=store)[0] == expected
            assert run(llama, prompts[::-1], batching, store=store)[0] == expected[::-1]
        assert store.stats()["hits"] > 0


def test_several_sequences_of_a_request(tmp_path, llama, fingerprint):
    config = GenerationConfig(
        max_new_tokens=12, eos_token_id=-1, pad_token_id=0, do_sample=True, num_return_sequences=3
    )
    expected = generate_batch(llama, texts(2), config, BATCHING, seed=5)
    with opened(tmp_path, fingerprint) as store:
        for _ in range(2):
            got = generate_batch(llama, texts(2), config, BATCHING, seed=5, store=store)
            assert sorted(o.generated_tokens for o in got.values()) == sorted(
                o.generated_tokens for o in expected.values()
            )


def test_a_manager_keeps_texts_of_requests_that_come_and_go(tmp_path, llama, fingerprint):
    with opened(tmp_path, fingerprint) as store:
        manager = BatchingManager(llama, CONFIG, BATCHING, store=store)
        for _ in range(2):  # started again, the cache is the one of before
            manager.start()
            for prompt in texts(3):
                manager.add_request(prompt, max_new_tokens=4)
            gone = manager.add_request(texts(4)[3], max_new_tokens=200, streaming=True)
            assert gone is not None
            manager.get_result(request_id=gone, timeout=60)
            manager.cancel_request(gone)
            for _ in range(3):
                assert manager.get_result(timeout=60) is not None
            manager.stop(block=True)
        for prompt in texts(4):
            assert store.lookup(prompt).num_tokens == len(prompt)


def damage(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 16:
            data = bytearray(file.read_bytes())
            for at in range(1 << 12, len(data), 509):
                data[at] ^= 0x55
            file.write_bytes(data)


@pytest.mark.parametrize("failure", ["damaged", "full", "readonly", "closed"])
def test_a_store_that_fails_costs_time_alone(tmp_path, llama, fingerprint, failure):
    expected, all_tokens = run(llama, texts(4))
    slots = {"capacity_bytes": 1 << 14} if failure == "full" else {}
    with opened(tmp_path, fingerprint, **slots) as store:
        run(llama, texts(4), store=store)
    if failure == "damaged":
        damage(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with opened(tmp_path, fingerprint, readonly=failure == "readonly", **slots) as store:
            if failure == "closed":
                store.close()
            got, tokens = run(llama, texts(4), store=store)
    assert got == expected
    if failure == "readonly":
        assert tokens < all_tokens
    elif failure != "full":  # which may have some of them
        assert tokens == all_tokens


def refused() -> list[Any]:
    sharing = ContinuousBatchingConfig(page_size=PAGE, allow_block_sharing=False)
    return [
        ({"store": 5}, BATCHING, "Llama", "store is int; expected a KVStore"),
        ({}, sharing, "Llama", "allow_block_sharing=False; expected True"),
        ({}, BATCHING, "Mistral", "sliding windows; expected a model without"),
    ]


@pytest.mark.parametrize(("arguments", "batching", "name", "message"), refused())
def test_what_cannot_have_a_store(tmp_path, arguments, batching, name, message):
    model = build_window_model(name)
    with opened(tmp_path, Fingerprint.from_model(model)) as store:
        arguments = {"store": store, **arguments}
        with pytest.raises((ValueError, TypeError), match=message):
            BatchingManager(model, CONFIG, batching, **arguments)


def test_a_store_of_another_model(tmp_path, llama):
    other = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    with (
        opened(tmp_path, Fingerprint.from_model(other)) as store,
        pytest.raises(FingerprintMismatchError),
    ):
        generate_batch(llama, texts(1), CONFIG, BATCHING, store=store)
