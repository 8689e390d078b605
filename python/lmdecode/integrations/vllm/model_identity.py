"""``Fingerprint`` of vLLM's KV cache: all that its blocks depend on besides the tokens."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from lmdecode.store import Fingerprint
from lmdecode.store.fingerprint import hash_config

_NAME = "LmdecodeConnector"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_PARALLEL = (
    "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
    "prefill_context_parallel_size",
)  # fmt: skip


def cache_spec(config: Any, kv_cache_config: Any) -> tuple[Any, list[str]]:
    """Return the spec and the layers of an engine's KV cache.

    Takes the engine's ``VllmConfig`` and ``KVCacheConfig``. Raises ValueError that names what the
    connector does not take.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(f"{_NAME}: the KV cache has {len(groups)} groups of layers; expected 1")
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) or isinstance(
        spec, MLAAttentionSpec
    ):
        raise ValueError(
            f"{_NAME}: layers have a {type(spec).__name__}; expected full attention or a sliding "
            f"window"
        )
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise ValueError(
            f"{_NAME}: values have {spec.head_size_v} numbers a head and keys {spec.head_size}; "
            f"expected as many"
        )
    for name in _PARALLEL:
        if (size := getattr(config.parallel_config, name, 1)) != 1:
            raise ValueError(f"{_NAME}: {name} is {size}; expected 1")
    if config.speculative_config is not None:
        raise ValueError(f"{_NAME}: the engine has drafts (speculative_config); expected none")
    device = config.device_config.device_type
    if device != "cpu":
        raise ValueError(f"{_NAME}: the KV cache is on {device}; expected cpu")
    return spec, list(groups[0].layer_names)


def fingerprint(config: Any, kv_cache_config: Any, weights_hash: str | None) -> Fingerprint:
    """Describe an engine: equal only for engines whose blocks mean the same.

    Takes the engine's ``VllmConfig`` and ``KVCacheConfig``. ``weights_hash`` names the weights;
    with None all files of weights are read. Raises ValueError as ``cache_spec``, or where there are
    no files of weights.
    """
    spec, layers = cache_spec(config, kv_cache_config)
    model, cache = config.model_config, config.cache_config
    digest = hashlib.sha256()
    hash_config(digest, model.hf_config)
    digest.update((weights_hash or _hash_of_weights(config)).encode())
    # A block is moved as it lies, and its order is that of vLLM's kernels.
    layout = {
        "engine": "vllm",
        "version": vllm.__version__,
        "block_size": spec.block_size,
        "spec": repr(spec),
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(getattr(cache, "kv_cache_layout", "")),
        "isa": _isa(model.dtype, spec, str(cache.cache_dtype)),
        "quantization": str(model.quantization),
        "model_dtype": str(model.dtype),
        "max_model_len": model.max_model_len,  # some rotary embeddings follow it
    }
    dtype = str(spec.dtype).removeprefix("torch.")
    return Fingerprint(
        model_id=type(model.hf_config).__name__,
        weights_hash=digest.hexdigest(),
        dtype="uint8" if dtype.startswith("float8") else dtype,
        num_layers=len(layers),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        layout=json.dumps(layout, sort_keys=True),
        model_name=str(model.model),
        revision=model.revision,
    )


def _isa(dtype: Any, spec: Any, cache_dtype: str) -> str:
    """The order within a block, as vLLM's attention on CPUs chooses it for a machine."""
    from vllm.v1.attention.backends import cpu_attn

    return str(cpu_attn._get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype))


def _hash_of_weights(config: Any) -> str:
    model = config.model_config
    if str(config.load_config.load_format) == "dummy":
        raise ValueError(
            f"{_NAME}: the weights are dummies; expected a name for them, weights_hash of "
            f"kv_connector_extra_config"
        )
    folder = Path(model.model)
    if not folder.exists():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(model.model, revision=model.revision, local_files_only=True)
        )
    files = [folder] if folder.is_file() else _weight_files(folder)
    if not files:
        raise ValueError(
            f"{_NAME}: no files of weights in {folder}; expected some, or a name for them, "
            f"weights_hash of kv_connector_extra_config"
        )
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.name}:{state.st_size};".encode())
        digest.update(_hash_of_file(file, state.st_size, state.st_mtime_ns))
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)})


@functools.cache
def _hash_of_file(file: Path, size: int, mtime: int) -> bytes:
    """Of all bytes; scheduler and worker may be in one process."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
