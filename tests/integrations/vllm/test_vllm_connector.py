"""The connector against a stand-in of vLLM's scheduler and worker, without vLLM."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_stand_in import (
    BLOCK,
    DIM,
    HEADS,
    MODULES,
    NAMES,
    Configuration,
    Engine,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    Role,
    SlidingWindowSpec,
    request,
)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of vLLM that the connector imports; the connector's own are loaded anew."""
    for name in MODULES:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in MODULES or parent == name:
                module = ModuleType(parent)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, parent, module)
                vars(module).update(MODULES.get(parent, {}))
            if end > 1:
                monkeypatch.setattr(
                    sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[parent],
                    raising=False,
                )  # fmt: skip
    ours = ("connector", "model_identity")
    for name in ours:
        monkeypatch.delitem(sys.modules, f"lmdecode.integrations.vllm.{name}", raising=False)
    yield importlib.import_module("lmdecode.integrations.vllm.connector")
    for name in ours:
        monkeypatch.delitem(sys.modules, f"lmdecode.integrations.vllm.{name}", raising=False)


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return Configuration(tmp_path)


@pytest.fixture
def start(vllm: Any, configuration: Configuration) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def begin(**options: Any) -> Engine:
        for engine in engines:
            engine.close()
        configuration.options["durability"] = "strict"  # found at once by the other role
        engines.append(Engine(vllm, configuration, **options))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(
        0, 50_000, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("chunk", [7, BLOCK, 1000])
def test_blocks_are_found_after_a_restart(
    length: int, chunk: int, start: Callable[..., Engine]
) -> None:
    start().whole(request("a", tokens_of(length)), chunk)
    engine, again = start(), request("b", tokens_of(length))
    engine.free.reverse()
    engine.admit(again)
    assert again.cached == (length - 1) // BLOCK * BLOCK
    engine.step("b", b=length - again.computed)
    assert engine.is_right(again, 0, length)


def test_blocks_behind_those_that_vllm_has(start: Callable[..., Engine]) -> None:
    start().whole(request("a", tokens_of(100)))
    engine, again = start(), request("b", tokens_of(100), computed=2 * BLOCK, block_ids=[198, 199])
    for place in range(2 * BLOCK):
        for layer, name in enumerate(NAMES):
            engine.kv[name][again.block_ids[place // BLOCK], :, place % BLOCK] = engine.numbers(
                again.all_token_ids, place
            )[layer]
    engine.admit(again)
    assert again.cached == 4 * BLOCK
    engine.step("b", b=4)
    assert engine.is_right(again, 0, 100)


def test_answers_are_stored_as_they_grow(start: Callable[..., Engine]) -> None:
    engine, one = start(), request("a", tokens_of(20))
    engine.admit(one)
    engine.step("a", a=20)
    for token in tokens_of(30, 1):
        one.all_token_ids.append(token)
        engine.step(a=1)
    engine, again = start(), request("b", [*one.all_token_ids, 5])
    engine.admit(again)
    assert again.cached == 3 * BLOCK
    engine.step("b", b=3)
    assert engine.is_right(again, 0, 51)


def test_tokens_that_are_not_known_yet_wait(start: Callable[..., Engine]) -> None:
    """More tokens may be scheduled than a request has: drafts, and what runs ahead."""
    engine, one = start(), request("a", tokens_of(BLOCK - 2))
    engine.admit(one)
    engine.grow(one, 3 * BLOCK)
    output = SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={"a": BLOCK + 4},
    )
    assert engine.scheduler.build_connector_meta(output).saves == []


def test_windows_whose_blocks_leave(start: Callable[..., Engine]) -> None:
    window = 2 * BLOCK
    start().whole(request("a", tokens_of(200), window=window), chunk=50)
    engine, again = start(), request("b", tokens_of(200), window=window)
    engine.admit(again)
    assert again.cached == 192
    assert again.block_ids[:9] == [0] * 9 + again.block_ids[9:9]
    engine.step("b", b=8)
    assert engine.is_right(again, 0, 200)
    assert all((engine.kv[name][0] == 0).all() for name in NAMES)


def test_a_request_that_was_preempted(start: Callable[..., Engine]) -> None:
    engine, one = start(), request("a", tokens_of(60))
    engine.admit(one)
    engine.step("a", a=60)
    engine.free += one.block_ids
    one.block_ids, one.computed = [], 0
    engine.running.pop("a")
    for name in NAMES:
        engine.kv[name].zero_()
    engine.match(one)
    assert one.cached == 3 * BLOCK
    engine.step(a=12)
    assert engine.is_right(one, 0, 60)


def stored(engine: Engine) -> int:
    return len(engine.worker._store._store.entries())


@pytest.mark.parametrize("window", [None, 2 * BLOCK])
def test_a_request_whose_load_fails_begins_anew(
    window: int | None, start: Callable[..., Engine]
) -> None:
    start().whole(request("a", tokens_of(100), window=window))
    engine, one = start(), request("b", tokens_of(100), window=window)
    store = engine.worker._store
    load, bad = store.load, {}

    def damaged(block: Any, kv: Any) -> bool:
        """A block that is read, found damaged, and dropped."""
        if not bad:
            bad[block] = engine.scheduler._requests["b"].blocks.index(block)
            has = engine.scheduler._store.has
            engine.scheduler._store.has = lambda other: other != block and has(other)
            return False
        return bool(load(block, kv))

    store.load = damaged
    engine.admit(one)
    assert one.tries == [6 * BLOCK, bad.popitem()[1] * BLOCK]
    assert not engine.step("b", b=100 - one.computed)
    assert engine.is_right(one, 0, 100)
    assert stored(engine) == 6


def test_a_store_that_cannot_be_read_at_all(start: Callable[..., Engine]) -> None:
    start().whole(request("a", tokens_of(100)))
    engine, one = start(), request("b", tokens_of(100))
    asked: list[Any] = []
    engine.worker._store.load = lambda block, kv: asked.append(block)
    engine.admit(one)
    assert one.tries == [6 * BLOCK, 6 * BLOCK, 0]
    assert len(asked) == 12 and len(set(asked)) == 6  # all that is damaged is met at once
    engine.step("b", b=100)
    assert engine.is_right(one, 0, 100)


@pytest.mark.parametrize(
    "others",
    [{"lora_request": object()}, {"mm_features": [object()]}, {"prompt_embeds": torch.zeros(1)}],
    ids=["adapter", "image", "embeddings"],
)
def test_requests_of_more_than_tokens_go_past_the_store(
    others: dict[str, Any], start: Callable[..., Engine]
) -> None:
    engine = start()
    engine.whole(request("a", tokens_of(100), **others))
    assert engine.worker._store._store.entries() == []
    engine.whole(request("b", tokens_of(100)))
    one = request("c", tokens_of(100), **others)
    engine.admit(one)
    assert one.cached == 0


def test_a_salt_of_a_request(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.whole(request("a", tokens_of(100), cache_salt="one"))
    for salt, cached in (("two", 0), (None, 0), ("one", 96)):
        one = request(f"b{salt}", tokens_of(100), cache_salt=salt)
        engine.admit(one)
        assert one.cached == cached


def test_nothing_is_kept_of_requests_that_ended(start: Callable[..., Engine]) -> None:
    engine = start()
    for i in range(5):
        engine.whole(request(f"r{i}", tokens_of(40, i)))
    last = request("last", tokens_of(3))
    engine.admit(last)
    engine.step("last", last=3)
    assert list(engine.scheduler._requests) == ["last"]


def test_failures_are_computed_anew_whatever_vllms_default_is(
    start: Callable[..., Engine], configuration: Configuration
) -> None:
    start()
    assert configuration.kv_transfer_config.kv_load_failure_policy == "recompute"


def _changes(configuration: Configuration) -> dict[str, Callable[[], None]]:
    model, cache = configuration.model_config, configuration.cache_config

    def spec(**fields: Any) -> Callable[[], None]:
        return lambda: setattr(configuration, "spec", FullAttentionSpec(**fields))

    return {
        "weights": lambda: _write(configuration.model_folder / "model.safetensors"),
        "another file": lambda: _write(configuration.model_folder / "more.safetensors"),
        "configuration": lambda: configuration.config.update(rope=2),
        "name of weights": lambda: configuration.options.update(weights_hash="2"),
        "block size": spec(block_size=2 * BLOCK),
        "dtype": spec(dtype=torch.bfloat16),
        "heads": spec(num_kv_heads=1),
        "head size": spec(head_size=16, head_size_v=16),
        "window": lambda: setattr(configuration, "spec", SlidingWindowSpec()),
        "model's dtype": lambda: setattr(model, "dtype", torch.bfloat16),
        "quantization": lambda: setattr(model, "quantization", "fp8"),
        "length": lambda: setattr(model, "max_model_len", 1024),
        "dtype of the cache": lambda: setattr(cache, "cache_dtype", "fp8"),
        "layout": lambda: setattr(cache, "kv_cache_layout", "LBNHC"),
        "version": lambda: setattr(sys.modules["vllm"], "__version__", "1"),
        "kernels": lambda: setattr(
            sys.modules["vllm.v1.attention.backends.cpu_attn"], "_get_attn_isa", lambda *a: "amx"
        ),
    }


def _write(file: Path) -> None:
    file.write_bytes(b"wEights")


@pytest.mark.parametrize("change", list(_changes(SimpleNamespace(model_config=0, cache_config=0))))  # type: ignore[arg-type]
def test_what_changes_keys_and_values_is_told_apart(
    change: str, vllm: Any, configuration: Configuration
) -> None:
    def name() -> str:
        made: str = vllm.fingerprint(
            configuration, configuration.caches, configuration.options.get("weights_hash")
        ).name
        return made

    before = name()
    assert name() == before
    _changes(configuration)[change]()
    assert name() != before


def test_the_place_of_the_model_does_not_count(vllm: Any, configuration: Configuration) -> None:
    before = vllm.fingerprint(configuration, configuration.caches, None).name
    moved = configuration.model_folder.rename(configuration.model_folder.with_name("moved"))
    configuration.model_config.model = str(moved)
    assert vllm.fingerprint(configuration, configuration.caches, None).name == before


def _refused(configuration: Configuration) -> dict[str, tuple[Callable[[], Any], str]]:
    def parallel(name: str) -> Callable[[], None]:
        return lambda: setattr(configuration.parallel_config, name, 2)

    def spec(value: Any) -> Callable[[], None]:
        return lambda: setattr(configuration, "spec", value)

    return {
        "no path": (lambda: configuration.options.pop("path"), "has no 'path'"),
        "no capacity": (lambda: configuration.options.pop("capacity_bytes"), "no 'capacity_bytes'"),
        "unknown": (lambda: configuration.options.update(size=1), "size is no option; expected"),
        "capacity": (
            lambda: configuration.options.update(capacity_bytes=0), "capacity_bytes is 0; expected"
        ),
        "tensor parallel": (parallel("tensor_parallel_size"), "tensor_parallel_size is 2"),
        "pipeline": (parallel("pipeline_parallel_size"), "pipeline_parallel_size is 2"),
        "drafts": (lambda: setattr(configuration, "speculative_config", 1), "has drafts"),
        "device": (
            lambda: setattr(configuration.device_config, "device_type", "cuda"), "is on cuda"
        ),
        "kind": (spec(MambaSpec()), "have a MambaSpec"),
        "latent": (spec(MLAAttentionSpec()), "have a MLAAttentionSpec"),
        "values": (spec(FullAttentionSpec(head_size_v=4)), "values have 4 numbers a head"),
        "dummies": (
            lambda: setattr(configuration.load_config, "load_format", "dummy"), "are dummies"
        ),
        "no weights": (
            lambda: (configuration.model_folder / "model.safetensors").unlink(), "no files of"
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(_refused(SimpleNamespace())))  # type: ignore[arg-type]
def test_what_is_not_taken_is_an_error(
    case: str, vllm: Any, configuration: Configuration, tmp_path: Path
) -> None:
    change, message = _refused(configuration)[case]
    change()
    with pytest.raises(ValueError, match=message):
        vllm.LmdecodeConnector(configuration, Role.WORKER, configuration.caches)
    assert not (tmp_path / "store").exists()


def test_a_cache_of_another_shape_is_an_error(start: Callable[..., Engine]) -> None:
    engine = start()
    caches = {name: torch.zeros(4, BLOCK, HEADS, 2 * DIM) for name in NAMES}
    with pytest.raises(ValueError, match=r"layer layer.0 has a cache of shape \[4, 16, 2, 16\]"):
        engine.worker.register_kv_caches(caches)
