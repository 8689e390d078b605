"""The store against a dictionary of prefixes: any sequence of calls, with restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_cases import CHUNK, cache, fingerprint, same

from lmdecode.store import CostModel, Fingerprint, KVStore, Session

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK)
NAMES = st.sampled_from("abc")
TENANTS = st.sampled_from(["", "x"])


def common(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))  # fmt: skip


class StoreMachine(RuleBasedStateMachine):
    """Nothing is evicted: the longest stored prefix is known."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stored: dict[str, list[list[int]]] = {"": [], "x": []}
        self.sessions: dict[str, list[int]] = {}
        self.store = self.opened()

    def opened(self) -> KVStore:
        return KVStore(self.folder / "store", fingerprint=fingerprint(), chunk_tokens=CHUNK,
                       capacity_bytes=1 << 26, _slab_bytes=1 << 16)  # fmt: skip

    def longest(self, tenant: str, tokens: list[int]) -> int:
        return max((common(tokens, known) for known in self.stored[tenant]), default=0)

    @rule(tenant=TENANTS, tokens=TOKENS)
    def put(self, tenant: str, tokens: list[int]) -> None:
        assert self.store.for_tenant(tenant).put(tokens, cache(tokens)) == len(tokens)
        self.stored[tenant].append(tokens)

    @rule(tenant=TENANTS, tokens=TOKENS)
    def look_up(self, tenant: str, tokens: list[int]) -> None:
        view = self.store.for_tenant(tenant)
        hit = view.lookup(tokens)
        assert hit.num_tokens == self.longest(tenant, tokens)
        if hit:
            assert same(view.load(hit), cache(tokens[: hit.num_tokens]))
        hit.release()

    @rule(name=NAMES, tokens=TOKENS)
    def talk(self, name: str, tokens: list[int]) -> None:
        session = self.session(name)
        session.step(tokens)
        assert session.commit(cache(session.tokens)) == len(session)
        self.sessions[name] = session.tokens
        self.stored[""].append(session.tokens)

    @rule(name=NAMES, part=st.floats(0, 1))
    def rewind(self, name: str, part: float) -> None:
        session = self.session(name)
        session.rewind(int(part * len(session)))
        self.sessions[name] = session.tokens

    @rule(name=NAMES)
    def resume(self, name: str) -> None:
        session = self.session(name)
        found, kv = session.resume()
        assert found == self.longest("", session.tokens)
        if found:
            assert same(kv, cache(session.tokens[:found]))

    def session(self, name: str) -> Session:
        session = self.store.session(name)
        assert session.tokens == self.sessions.get(name, [])
        return session

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opened()

    @precondition(lambda self: self.stored[""])
    @rule()
    def collect(self) -> None:
        assert self.store.gc() == 0

    @invariant()
    def every_area_is_used_or_free(self) -> None:
        stats = self.store.stats()
        areas = stats["used_areas"] + stats["idle_areas"] + stats["freed_areas"]
        assert areas == stats["capacity_areas"]
        assert stats["damaged"] == stats["declined"] == 0

    def teardown(self) -> None:
        assert not self.store.verify().damage
        self.store.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestStore = StoreMachine.TestCase


def test_loading_is_chosen_where_it_is_faster() -> None:
    costs = CostModel()
    assert costs.should_load(10, 10**9)  # nothing measured yet
    assert not costs.should_load(0, 0)
    costs.observe_load(10**9, 1.0)
    assert costs.should_load(10, 10**12)
    costs.observe_prefill(1000, 1.0)
    assert costs.load_bandwidth == pytest.approx(1e9)
    assert costs.prefill_rate == pytest.approx(1000)
    assert costs.should_load(1000, 9 * 10**8)
    assert not costs.should_load(1000, 11 * 10**8)
    for _ in range(50):
        costs.observe_prefill(2000, 1.0)  # the model runs faster now
    assert not costs.should_load(1000, 9 * 10**8)


def test_a_store_measures_its_loads(tmp_path: Path) -> None:
    with KVStore(
        tmp_path, fingerprint=fingerprint(), capacity_bytes=1 << 20, chunk_tokens=CHUNK
    ) as store:
        tokens = list(range(40))
        store.put(tokens, cache(tokens))
        hit = store.lookup(tokens)
        assert store.should_load(hit)
        store.load(hit)
        store.record_prefill(40, 1e-9)
        assert not store.should_load(hit)
        assert not store.should_load(store.lookup([999]))


class Config:
    """What ``from_model`` reads of a transformers configuration."""

    num_hidden_layers, num_attention_heads, num_key_value_heads = 3, 4, 2
    hidden_size, head_dim = 32, None
    sliding_window, layer_types = 16, ["sliding_attention", "full_attention", "full_attention"]
    rope_theta = 1e4

    def __init__(self, **extra: object) -> None:
        self.extra = extra

    def to_dict(self) -> dict[str, object]:
        return {"hidden_size": 32, "_name_or_path": "/somewhere", **self.extra}

    def get_text_config(self, decoder: bool) -> Config:
        assert decoder
        return self


class Model(torch.nn.Linear):
    dtype = torch.bfloat16

    def __init__(self, **extra: object) -> None:
        super().__init__(3, 3)
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self.config = Config(**extra)


def test_a_model_has_a_fingerprint() -> None:
    one = Fingerprint.from_model(Model())
    assert (one.num_layers, one.num_kv_heads, one.head_size, one.dtype) == (3, 2, 8, "bfloat16")
    assert one.window == (16, None, None)
    assert one == Fingerprint.from_model(Model(_name_or_path="/elsewhere"))
    assert one.weights_hash != Fingerprint.from_model(Model(eps=1)).weights_hash
    revised = Model()
    with torch.no_grad():
        revised.weight[0, 0] += 1e-3
    assert one.weights_hash != Fingerprint.from_model(revised).weights_hash

    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with_tokenizer = Fingerprint.from_model(Model(), Tokenizer())
    assert with_tokenizer.tokenizer_hash is not None
    assert with_tokenizer.name != one.name
