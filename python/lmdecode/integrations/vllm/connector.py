"""``LmdecodeConnector``: vLLM's KV cache on disk, on nodes without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmdecode._checks import check_int
from lmdecode.integrations.block_store import Block, BlockStore, StoreOptions, blocks_of
from lmdecode.integrations.vllm.model_identity import cache_spec, fingerprint
from lmdecode.store.kv_store import KV

_NAME = "LmdecodeConnector"
_OPTIONS = (
    "path", "capacity_bytes", "directory_bytes", "durability", "salt", "weights_hash",
)  # fmt: skip
_NULL_BLOCK = 0  # vLLM's place for blocks that have left a sliding window
_MOST_FAILURES = 2  # of a request; what a first one drops from the store, a second does not meet


class Move(NamedTuple):
    """Blocks of one request, and where in the KV cache they lie."""

    request_id: str
    blocks: list[Block]
    block_ids: list[int]


@dataclass
class StepMoves(KVConnectorMetadata):
    """Work of the worker in a step: loads of waiting requests, saves of requests that ran."""

    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


@dataclass
class _Known:
    """A request, as the scheduler's side sees it.

    ``blocks`` are its whole blocks so far, and ``planned`` is how many of them the worker has been
    told to save. ``first`` is the first block that vLLM lacked when it asked; ``failures`` counts
    failed loads.
    """

    request: Any
    blocks: list[Block] = field(default_factory=list)
    planned: int = 0
    first: int = 0
    failures: int = 0


class LmdecodeConnector(KVConnectorBase_V1):
    """vLLM's KV cache in a ``lmdecode.KVStore``: prompts are found again after a restart.

    vLLM makes it, where ``--kv-transfer-config`` names it (docs/guides/serving_engines.md). Whole
    blocks are stored, of prompts and of answers, as they lie in the cache. The fingerprint covers
    the model, all its weights, dtypes, the block size and the order within blocks: what another
    configuration stored is never found. A store that is full, damaged, read-only or gone costs
    time; vLLM goes on.

    Options of ``kv_connector_extra_config``: "path", the folder, and "capacity_bytes", both needed;
    "durability", "relaxed" by default, and "salt", as of ``KVStore``; "weights_hash", a name for
    the weights, so that their files need not be read.

    Requests with adapters, images or embeddings go past it.

    Raises
    ------
    ValueError
        An option is missing or wrong, or the engine has what is not taken: several devices, drafts,
        a GPU, layers that are neither full attention nor sliding windows.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = dict(transfer.kv_connector_extra_config)
        for name in options.keys() - set(_OPTIONS):
            raise ValueError(f"{_NAME}: {name} is no option; expected {', '.join(_OPTIONS)}")
        if "path" not in options:
            raise ValueError(f"{_NAME}: kv_connector_extra_config has no 'path'")
        limits = {"capacity_bytes", "directory_bytes"} & options.keys()
        if not limits:
            raise ValueError(f"{_NAME}: kv_connector_extra_config has no 'capacity_bytes'")
        for name in limits:
            check_int(_NAME, name, options[name], 1)
        weights_hash = options.pop("weights_hash", None)
        spec, _ = cache_spec(vllm_config, kv_cache_config)
        self._block_size: int = spec.block_size
        # A request whose load fails is computed. vLLM's own default ends it.
        transfer.kv_load_failure_policy = "recompute"
        self._requests: dict[str, _Known] = {}
        self._to_load: dict[str, int] = {}
        self._layers: list[Tensor] = []
        self._results = KVConnectorTransferResults()
        self._store = BlockStore(
            StoreOptions(**options), fingerprint(vllm_config, kv_cache_config, weights_hash),
            self._block_size, writes=role == KVConnectorRole.WORKER,
        )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether what is saved must arrive: no."""
        return False

    def shutdown(self) -> None:
        """Make everything durable."""
        self._store.close()

    # ---- the scheduler's side

    def on_new_request(self, request: Any) -> None:
        """Remember a request whose tokens say all about its keys and values."""
        is_text = request.lora_request is None and request.prompt_embeds is None
        if is_text and not request.mm_features:
            self._requests[request.request_id] = _Known(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Count the tokens behind those that vLLM has which can be loaded, while the request waits.

        So a load that fails leaves nothing behind: vLLM begins the request anew. In a step that
        already computes with the blocks it could not, where a window has let go of earlier ones.
        """
        known = self._requests.get(request.request_id)
        if known is None or known.failures >= _MOST_FAILURES:
            return 0, False
        blocks = self._blocks(known)
        known.first = end = num_computed_tokens // self._block_size
        most = (request.num_tokens - 1) // self._block_size  # one token is left to compute
        while end < most and self._store.has(blocks[end]):
            end += 1
        return (end - known.first) * self._block_size, end > known.first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember that so many tokens of a request shall be loaded."""
        if num_external_tokens > 0:
            self._to_load[request.request_id] = num_external_tokens // self._block_size

    def build_connector_meta(self, scheduler_output: Any) -> StepMoves:
        """Return what waiting requests load and which filled blocks are saved in a step."""
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        moves = StepMoves()
        for request_id, count in self._to_load.items():
            waiting = self._requests[request_id]
            part = slice(waiting.first, waiting.first + count)
            blocks, block_ids = waiting.blocks[part], self._block_ids(request_id)[part]
            moves.loads.append(Move(request_id, blocks, block_ids))
        self._to_load.clear()
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        for request_id, before in computed.items():
            if (known := self._requests.get(request_id)) is None:
                continue
            blocks = self._blocks(known)
            after = before + scheduler_output.num_scheduled_tokens[request_id]
            known.planned = min(known.planned, before // self._block_size)  # after a preemption
            full = min(after // self._block_size, len(blocks))
            if full > known.planned:
                known.planned = full
                block_ids = self._block_ids(request_id)[:full]
                moves.saves.append(Move(request_id, blocks[:full], block_ids))
        return moves

    def update_connector_output(self, connector_output: Any) -> None:
        """Count loads that failed."""
        for request_id in connector_output.failed_recving or ():
            if request_id in self._requests:
                self._requests[request_id].failures += 1

    def _block_ids(self, request_id: str) -> list[int]:
        """As they are in this step: those that leave a window in the next one are still there."""
        block_ids: list[int]
        (block_ids,) = self._kv_cache_manager.get_block_ids(request_id)
        return block_ids

    def _blocks(self, known: _Known) -> list[Block]:
        request = known.request
        if len(known.blocks) < request.num_tokens // self._block_size:
            salt = (getattr(request, "cache_salt", None) or "").encode()
            tokens = request.all_token_ids
            known.blocks = blocks_of(tokens, self._block_size, salt, known.blocks)
        return known.blocks

    # ---- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the KV cache: of each layer [blocks, heads, block size, 2 * head size].

        Raises
        ------
        ValueError
            It has another shape.
        """
        spec, names = cache_spec(self._vllm_config, self._kv_cache_config)
        expected = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        layers = []
        for name in names:
            cache = kv_caches[name]
            if tuple(cache.shape[1:]) != expected or not cache[0].is_contiguous():
                raise ValueError(
                    f"{_NAME}: layer {name} has a cache of shape {list(cache.shape)}; expected "
                    f"[blocks, {', '.join(map(str, expected))}], its blocks contiguous"
                )
            if cache.dtype.itemsize == 1:
                cache = cache.view(torch.uint8)
            # Of a head of a block, keys come before values.
            layers.append(cache.view(len(cache), expected[0], 2 * expected[1], spec.head_size))
        self._layers = layers

    def _kv(self, block_id: int) -> KV:
        """Where keys and values of a block lie, of each layer."""
        size = self._block_size
        return [(layer[block_id, :, :size], layer[block_id, :, size:]) for layer in self._layers]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read the blocks of this step's loads into the KV cache."""
        for move in self._step_moves().loads:
            # All of them, whatever becomes of the first: what is damaged is dropped, and not met
            # again when the request begins anew.
            loaded = [
                self._store.load(block, self._kv(block_id))
                for block, block_id in self._backwards(move)
                if block_id != _NULL_BLOCK
            ]
            self._results.finished_recving.add(move.request_id)
            if not all(loaded):
                self._results.failed_recving.add(move.request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose blocks have been loaded since the last call, or could not."""
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def wait_for_save(self) -> None:
        """Store the blocks that this step has filled."""

        def filled() -> Iterator[Any]:
            for move in self._step_moves().saves:
                for block, block_id in self._backwards(move):
                    is_gone = block_id == _NULL_BLOCK
                    yield block, None if is_gone else partial(self._kv, block_id)

        if self._layers and self._step_moves().saves:
            self._store.save(filled())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is loaded while a request waits."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved when all layers have been computed."""

    def _step_moves(self) -> StepMoves:
        moves: StepMoves = self._get_connector_metadata()
        return moves

    @staticmethod
    def _backwards(move: Move) -> Iterator[tuple[Block, int]]:
        """The last blocks first, as ``BlockStore.save`` wants them."""
        return zip(reversed(move.blocks), reversed(move.block_ids), strict=True)
