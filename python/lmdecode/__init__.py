"""lmdecode: from a language model's logits to its next token, fused, exact and reproducible.

``top_k_top_p_sample`` is the sampling op; ``lmdecode.integrations.transformers`` plugs it into
``generate()``. ``log_softmax_top_k`` turns logits into candidates of beam search.
``reorder_cache_`` reorders a KV cache by its beams. ``BeamSearch`` combines these into continuous
batching of searches. ``sliding_window_attention`` and ``sliding_window_decode`` attend to a window
of keys, which ``RingKVCache`` holds. ``PackedLinear`` is a linear layer whose weight is packed
once. ``Decoding`` runs whole models. Its ``Engine`` generates any number of texts at a time.
``Transcriber`` turns speech into text. ``KVStore`` keeps KV caches on disk. ``Session`` follows a
conversation in it. ``lmdecode.reference`` has every op again in plain torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lmdecode import decoder
from lmdecode._checks import Error
from lmdecode.attention import (
    RingKVCache,
    RingSnapshot,
    compressed_swa_mask,
    expand_compressed_swa_mask,
    merge_attention_states,
    ring_cache_append_,
    sliding_window_attention,
    sliding_window_decode,
    swa_mask,
)
from lmdecode.beam import (
    BeamCandidates,
    BeamFinal,
    BeamHypotheses,
    BeamParameters,
    BeamRequest,
    BeamResult,
    BeamSearch,
    BeamSearchOutput,
    BeamSearchScorer,
    BeamSequences,
    BeamState,
    BeamStep,
    BeamTrace,
    ConstrainedBeamSearchScorer,
    Constraint,
    ConstraintListState,
    DisjunctiveConstraint,
    PhrasalConstraint,
    Trie,
    beam_finalize,
    beam_parameters,
    beam_step,
    format_trace,
    log_softmax_top_k,
    new_beam_state,
)
from lmdecode.decoder import (
    CausalBatch,
    CausalConfig,
    CausalLayerWeights,
    CausalWeights,
    DecoderConfig,
    DecoderLayer,
    DecoderWeights,
    DecodingBatch,
    LayerWeights,
    gather_tree,
)
from lmdecode.decoder.engine import (
    Engine,
    EngineStats,
    Grammar,
    Request,
    RequestResult,
    RequestStats,
    TokenLogprob,
)
from lmdecode.decoding import Decoding
from lmdecode.eager import batch_invariant
from lmdecode.kv_cache import (
    BeamIndirection,
    BlockSlots,
    BlockTable,
    OutOfBlocksError,
    copy_blocks_,
    gather_indirect,
    reorder_cache_,
    update_beam_indirection_,
)
from lmdecode.linear import PackedLinear, layer_norm, rms_norm
from lmdecode.sampling import (
    DIALECTS,
    KeptSet,
    SampleOutput,
    Sampler,
    SamplerOutput,
    SamplingParameters,
    VerifyOutput,
    prompt_lookup,
    top_k_top_p_sample,
    verify_draft,
)
from lmdecode.system import cpu_capabilities, cpu_capability, has_cuda

if TYPE_CHECKING:
    from lmdecode.speech import Transcriber
    from lmdecode.store import Fingerprint, Hit, KVStore, Session, StoreError

__version__ = "0.1.0"

# The class is above its area, as it takes what transformers has; it is named there, too.
decoder.Decoding = Decoding

__all__ = [
    "DIALECTS",
    "BeamCandidates",
    "BeamFinal",
    "BeamHypotheses",
    "BeamIndirection",
    "BeamParameters",
    "BeamRequest",
    "BeamResult",
    "BeamSearch",
    "BeamSearchOutput",
    "BeamSearchScorer",
    "BeamSequences",
    "BeamState",
    "BeamStep",
    "BeamTrace",
    "BlockSlots",
    "BlockTable",
    "CausalBatch",
    "CausalConfig",
    "CausalLayerWeights",
    "CausalWeights",
    "ConstrainedBeamSearchScorer",
    "Constraint",
    "ConstraintListState",
    "DecoderConfig",
    "DecoderLayer",
    "DecoderWeights",
    "Decoding",
    "DecodingBatch",
    "DisjunctiveConstraint",
    "Engine",
    "EngineStats",
    "Error",
    "Fingerprint",
    "Grammar",
    "Hit",
    "KVStore",
    "KeptSet",
    "LayerWeights",
    "OutOfBlocksError",
    "PackedLinear",
    "PhrasalConstraint",
    "Request",
    "RequestResult",
    "RequestStats",
    "RingKVCache",
    "RingSnapshot",
    "SampleOutput",
    "Sampler",
    "SamplerOutput",
    "SamplingParameters",
    "Session",
    "StoreError",
    "TokenLogprob",
    "Transcriber",
    "Trie",
    "VerifyOutput",
    "batch_invariant",
    "beam_finalize",
    "beam_parameters",
    "beam_step",
    "compressed_swa_mask",
    "copy_blocks_",
    "cpu_capabilities",
    "cpu_capability",
    "expand_compressed_swa_mask",
    "format_trace",
    "gather_indirect",
    "gather_tree",
    "has_cuda",
    "layer_norm",
    "log_softmax_top_k",
    "merge_attention_states",
    "new_beam_state",
    "prompt_lookup",
    "reorder_cache_",
    "ring_cache_append_",
    "rms_norm",
    "sliding_window_attention",
    "sliding_window_decode",
    "swa_mask",
    "top_k_top_p_sample",
    "update_beam_indirection_",
    "verify_draft",
]


_AREAS = (
    "attention", "beam", "compat", "decoder", "eager", "formats", "integrations", "kv_cache",
    "linear", "models", "readers", "reference", "sampling", "serving", "speech", "store",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    # When they are asked for: only the store needs SQLite.
    if name in ("Fingerprint", "Hit", "KVStore", "Session", "StoreError"):
        return getattr(import_module("lmdecode.store"), name)
    if name == "Transcriber":
        return import_module("lmdecode.speech").Transcriber
    if name in _AREAS:
        return import_module(f"lmdecode.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *_AREAS, *__all__])
