"""Stand-ins of what the connector uses of vLLM: modules, configuration, scheduler and worker."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BLOCK, HEADS, DIM, LAYERS = 16, 2, 8, 3
NAMES = [f"layer.{i}" for i in range(LAYERS)]


class Role:
    SCHEDULER, WORKER = 0, 1


@dataclasses.dataclass
class TransferResults:
    finished_sending: set[str] = dataclasses.field(default_factory=set)
    finished_recving: set[str] = dataclasses.field(default_factory=set)
    failed_recving: set[str] = dataclasses.field(default_factory=set)


class Base:
    """What the connector uses of KVConnectorBase_V1."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._kv_cache_manager: Any = None
        self.metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = HEADS
    head_size: int = DIM
    dtype: torch.dtype = torch.float32
    head_size_v: int = DIM


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


# Modules that the connector imports, and what they have.
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0"},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": Base, "KVConnectorMetadata": object, "KVConnectorRole": Role,
        "KVConnectorTransferResults": TransferResults,
    },
    "vllm.v1.kv_cache_interface": {
        "FullAttentionSpec": FullAttentionSpec, "SlidingWindowSpec": SlidingWindowSpec,
        "MLAAttentionSpec": MLAAttentionSpec,
    },
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(DISK="disk")},
    "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda *arguments: "vec"},
}  # fmt: skip


class Configuration:
    """As ``VllmConfig`` has it, as far as the connector looks."""

    def __init__(self, folder: Path) -> None:
        self.model_folder = folder / "model"
        self.model_folder.mkdir(exist_ok=True)
        (self.model_folder / "model.safetensors").write_bytes(b"weights")
        config = {"rope": 1}
        self.kv_transfer_config = SimpleNamespace(
            kv_connector_extra_config={"path": str(folder / "store"), "capacity_bytes": 1 << 24},
            kv_load_failure_policy="fail",
        )
        self.model_config = SimpleNamespace(
            model=str(self.model_folder), revision=None, quantization=None, dtype=torch.float32,
            max_model_len=512, hf_config=SimpleNamespace(to_dict=lambda: dict(config)),
        )  # fmt: skip
        self.config = config
        self.cache_config = SimpleNamespace(cache_dtype="auto", kv_cache_layout="LBHNC")
        self.load_config = SimpleNamespace(load_format="auto")
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        self.device_config = SimpleNamespace(device_type="cpu")
        self.speculative_config: Any = None
        self.spec: Any = FullAttentionSpec()

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = self.kv_transfer_config.kv_connector_extra_config
        return options

    @property
    def caches(self) -> Any:
        group = SimpleNamespace(kv_cache_spec=self.spec, layer_names=NAMES)
        return SimpleNamespace(kv_cache_groups=[group])


class Request(SimpleNamespace):
    """As the scheduler has it, and with what this one keeps of it."""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request(name: str, tokens: list[int], **others: Any) -> Request:
    fields: dict[str, Any] = {
        "lora_request": None, "mm_features": [], "prompt_embeds": None, "cache_salt": None,
        "window": None, "computed": 0, "block_ids": [], "cached": 0, "tries": [],
    }  # fmt: skip
    return Request(request_id=name, all_token_ids=list(tokens), **fields | others)


class Engine:
    """A scheduler and a worker, whose model's keys and values follow from the tokens so far."""

    def __init__(self, connector: Any, configuration: Configuration, blocks: int = 200) -> None:
        caches = configuration.caches
        self.scheduler = connector.LmdecodeConnector(configuration, Role.SCHEDULER, caches)
        self.worker = connector.LmdecodeConnector(configuration, Role.WORKER, caches)
        self.scheduler._kv_cache_manager = self
        self.kv = {name: torch.zeros(blocks, HEADS, BLOCK, 2 * DIM) for name in NAMES}
        self.worker.register_kv_caches(self.kv)
        self.free = list(range(1, blocks))
        self.running: dict[str, Any] = {}
        self.finished: set[str] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (list(self.running[request_id].block_ids),)

    def numbers(self, tokens: list[int], place: int) -> torch.Tensor:
        """[LAYERS, HEADS, 2 * DIM], of a token and all before it."""
        seed = hash(tuple(tokens[: place + 1])) & 0xFFFFFFFF
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(LAYERS, HEADS, 2 * DIM, generator=generator)

    def is_right(self, one: Any, begin: int, end: int) -> bool:
        for place in range(begin, end):
            block_id = one.block_ids[place // BLOCK]
            if block_id:
                expected = self.numbers(one.all_token_ids, place)
                for layer, name in enumerate(NAMES):
                    if not torch.equal(self.kv[name][block_id, :, place % BLOCK], expected[layer]):
                        return False
        return True

    def admit(self, one: Any) -> None:
        """Begin a request: with what is found of it, loaded; ``tries`` has the tokens of each."""
        self.scheduler.on_new_request(one)
        self.match(one)

    def match(self, one: Any) -> None:
        local = one.computed
        while True:
            found, is_async = self.scheduler.get_num_new_matched_tokens(one, local)
            assert is_async == (found > 0)
            one.tries.append(found)
            self.running[one.request_id] = one
            one.computed = local + found
            self.grow(one, one.computed)
            self.scheduler.update_state_after_alloc(one, None, found)
            if not found or not self.step(waiting=True):
                break
            self.free += [block for block in one.block_ids[local // BLOCK :] if block]
            del one.block_ids[local // BLOCK :]
        one.cached = found

    def grow(self, one: Any, tokens: int) -> None:
        while len(one.block_ids) * BLOCK < tokens:
            one.block_ids.append(self.free.pop(0))
        if one.window:  # blocks that no token to come looks at
            for block in range(max(0, one.computed - one.window + 1) // BLOCK):
                if one.block_ids[block]:
                    self.free.append(one.block_ids[block])
                    one.block_ids[block] = 0

    def step(self, *new: str, waiting: bool = False, **scheduled: int) -> bool:
        """Compute so many tokens of each request; whether the load of one that waits failed."""
        for name, count in scheduled.items():
            self.grow(self.running[name], self.running[name].computed + count)
        old = [name for name in scheduled if name not in new]
        output = SimpleNamespace(
            finished_req_ids=self.finished,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=self.running[name].computed)
                for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old, num_computed_tokens=[self.running[name].computed for name in old]
            ),
            num_scheduled_tokens=scheduled,
        )
        self.finished = set()
        self.worker.metadata = self.scheduler.build_connector_meta(output)
        for name, count in scheduled.items():
            one = self.running[name]
            for place in range(one.computed, one.computed + count):
                numbers = self.numbers(one.all_token_ids, place)
                for layer, key in enumerate(NAMES):
                    self.kv[key][one.block_ids[place // BLOCK], :, place % BLOCK] = numbers[layer]
            one.computed += count
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        assert len(results.finished_recving) == waiting
        assert results.failed_recving <= results.finished_recving
        self.scheduler.update_connector_output(results)
        return bool(results.failed_recving)

    def finish(self, name: str) -> None:
        self.free += [block for block in self.running.pop(name).block_ids if block]
        self.finished.add(name)

    def whole(self, one: Any, chunk: int = 1000) -> None:
        """Run a request to its end."""
        self.admit(one)
        new = [one.request_id]
        while one.computed < one.num_tokens:
            self.step(*new, **{one.request_id: min(chunk, one.num_tokens - one.computed)})
            new = []
        self.finish(one.request_id)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
