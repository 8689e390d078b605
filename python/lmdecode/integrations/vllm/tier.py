"""``LmdecodeTier``: a second tier of vLLM's offloading, on disk."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import vllm
from torch import Tensor
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from lmdecode._checks import check_int
from lmdecode.integrations.block_store import StoreOptions
from lmdecode.integrations.page_store import PageStore

_NAME = "LmdecodeTier"


class LmdecodeTier(SecondaryTierManager):
    """vLLM's offloaded chunks in a ``KVStore``: checked when they are read, evicted, crash-safe.

    Named in ``secondary_tiers`` of vLLM's ``OffloadingConnector``, with ``module_path``
    "lmdecode.integrations.vllm". vLLM moves chunks between GPU and main memory; this moves them
    between main memory and disk, in threads of its own.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        Of vLLM.
    path
        Directory of the store.
    capacity_bytes, directory_bytes
        Limits, as of ``KVStore``; one of them at least.
    durability
        "relaxed" or "strict".
    salt
        The tenant.
    weights_hash
        A name for the weights. vLLM names the model alone here.
    locality
        "LOCAL" or "REMOTE", for vLLM's events.
    num_threads
        Of transfers.

    Raises
    ------
    ValueError, TypeError
        An option is missing or wrong.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        path: str,
        capacity_bytes: int | None = None,
        directory_bytes: int | None = None,
        durability: str = "relaxed",
        salt: str = "",
        weights_hash: str = "",
        locality: str | None = None,
        num_threads: int = 2,
    ) -> None:
        super().__init__(
            offloading_spec=offloading_spec, primary_kv_view=primary_kv_view, tier_type=tier_type,
            backpressure_detector=backpressure_detector,
        )  # fmt: skip
        self.locality = None if locality is None else Locality(locality)
        if capacity_bytes is None and directory_bytes is None:
            raise ValueError(f"{_NAME}: expected capacity_bytes or directory_bytes")
        check_int(_NAME, "num_threads", num_threads, 1)
        options = StoreOptions(
            path, capacity_bytes, durability, salt, directory_bytes, writers="many", owner=_NAME
        )
        # The chunks of main memory, [chunks, bytes].
        self._chunks = torch.from_numpy(np.asarray(primary_kv_view)).view(torch.uint8)
        self._pages = PageStore(
            options, _identity(offloading_spec.config, weights_hash), self.block_size_bytes
        )
        self._threads = ThreadPoolExecutor(num_threads, "lmdecode-tier")
        self._lock = threading.Lock()
        self._coming: set[Future[None]] = set()
        self._finished: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is stored."""
        return LookupResult.HIT if self._pages.has(key) else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Evict these chunks late."""
        for key in keys:
            self._pages.has(key)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks of main memory, in the background."""
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks into main memory, in the background."""
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that finished since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        """Whether a job runs, or its result has not been asked for."""
        with self._lock:
            return bool(self._coming or self._finished)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request like others."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all jobs."""
        with self._lock:
            coming = list(self._coming)
        wait(coming)

    def shutdown(self) -> None:
        """Wait for all jobs, and make everything durable; done again it does nothing."""
        self._threads.shutdown(wait=True)
        self._pages.close()

    # --- parts

    def _submit(self, job: TransferJob, move: Callable[[list[Any], list[Tensor]], list[bool]]
                ) -> None:  # fmt: skip
        keys = list(job.keys)
        chunks = [self._chunks[int(chunk)] for chunk in job.chunk_ids]
        if len(keys) != len(chunks):
            raise ValueError(f"{_NAME}: {len(keys)} keys and {len(chunks)} chunk_ids")

        def run() -> None:
            begin, done = time.perf_counter(), [False] * len(keys)
            try:
                done = move(keys, chunks)
            finally:  # whatever happened: vLLM waits for each job
                moved = [key for key, is_done in zip(keys, done, strict=True) if is_done]
                result = JobResult(
                    job_id=job.job_id,
                    success=all(done),
                    successful_keys=moved,
                    transfer_time=time.perf_counter() - begin,
                    transfer_bytes=sum(done) * self.block_size_bytes,
                )  # fmt: skip
                with self._lock:
                    self._finished.append(result)

        with self._lock:
            future = self._threads.submit(run)
            self._coming.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._coming.discard(future)

    def _store(self, keys: list[Any], chunks: list[Tensor]) -> list[bool]:
        return self._pages.save(
            [(key, partial(_same, chunk)) for key, chunk in zip(keys, chunks, strict=True)]
        )

    def _load(self, keys: list[Any], chunks: list[Tensor]) -> list[bool]:
        return [self._pages.load(key, chunk) for key, chunk in zip(keys, chunks, strict=True)]


def _same(chunk: Tensor) -> Tensor:
    return chunk


def _identity(config: Any, weights_hash: str) -> dict[str, Any]:
    """Return what chunks depend on besides the tokens, as far as vLLM exposes it here."""
    parallel = config.parallel
    layout = {
        "engine": "vllm tier",
        "version": vllm.__version__,
        "dtype": config.model.dtype,
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "sizes": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "replicated": config.replicated_layout,
        "canonical": config.kv_cache_layout if config.canonical_layout else None,
    }
    return dict(
        model_id=config.model.name,
        weights_hash=weights_hash,
        layout=json.dumps(layout, sort_keys=True),
        tensor_parallel_rank=parallel.rank,
    )
