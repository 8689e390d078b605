"""lmdecode inside Hugging Face transformers 5.x.

``sample`` and ``beam_search`` replace the decoding loop of ``model.generate(custom_generate=...)``:
one fused op draws each token, or finds the best continuations of the beams.
``TopKTopPLogitsProcessor`` is the filter alone, for any place that takes a ``LogitsProcessor``;
``GrammarLogitsProcessor`` is a grammar of xgrammar.
``BeamDynamicCache`` and ``BeamEncoderDecoderCache`` are KV caches for beam search, and
``beam_cache``, ``reorder_beams`` and ``expand_beams`` do their work on caches that exist.
``compare_with_transformers`` sets ``BeamSearch`` beside stock beam search, step by step.
``register()`` makes ``attn_implementation="lmdecode"`` known, attention to sliding windows without
masks, and ``"lmdecode_flash"``, that of continuous batching; ``DynamicRingCache`` and
``StaticRingCache`` are the caches that go with the first.
``generate_batch`` is transformers' continuous batching with this attention and one fused op for
the tokens of all requests; ``BatchingManager`` runs it.
``pack_linears_`` puts packed weights in the place of a model's linear layers, and
``LmdecodeConfig`` does so while ``from_pretrained`` loads it; ``load_quantized`` loads checkpoints
of AWQ and GPTQ, and ``packed_from_awq`` and ``packed_from_gptq`` take single layers of them.
``generate_with_store`` is ``generate()`` of a conversation that a ``KVStore`` keeps, made of
``prefill``, ``load_cache``, ``cache_from_kv`` and ``cache_to_kv``.
"""

from typing import TYPE_CHECKING, Any

from lmdecode._checks import install_hint

try:
    import transformers as _transformers  # noqa: F401  before the modules that need it
except ImportError as error:
    raise ImportError(
        f"lmdecode.integrations.transformers needs transformers 5: {install_hint('transformers')}"
    ) from error

from lmdecode.integrations.transformers.attention import register
from lmdecode.integrations.transformers.beam.diversity import HammingDiversityLogitsProcessor
from lmdecode.integrations.transformers.beam.generate_beam_search import beam_search
from lmdecode.integrations.transformers.beam.trace import BeamComparison, compare_with_transformers
from lmdecode.integrations.transformers.caches.beam_caches import (
    BeamDynamicCache,
    BeamEncoderDecoderCache,
    beam_cache,
    expand_beams,
    reorder_beams,
)
from lmdecode.integrations.transformers.caches.ring_caches import DynamicRingCache, StaticRingCache
from lmdecode.integrations.transformers.linear.checkpoints import packed_from_awq, packed_from_gptq
from lmdecode.integrations.transformers.linear.modules import PackedLinearModule
from lmdecode.integrations.transformers.linear.packing import pack_linears_
from lmdecode.integrations.transformers.quantized_folder import load_quantized
from lmdecode.integrations.transformers.quantizer import LmdecodeConfig
from lmdecode.integrations.transformers.sampling.generate_sampling import sample
from lmdecode.integrations.transformers.sampling.logits_process import (
    GrammarLogitsProcessor,
    TopKTopPLogitsProcessor,
)
from lmdecode.integrations.transformers.store.cache import (
    cache_from_kv,
    cache_to_kv,
    load_cache,
)
from lmdecode.integrations.transformers.store.generate_from_store import (
    generate_with_store,
    prefill,
)
from lmdecode.integrations.transformers.store.request import encoder_context

if TYPE_CHECKING:
    from lmdecode.integrations.transformers.continuous_batching.batching_manager import (
        BatchingManager,
        generate_batch,
    )

__all__ = [
    "BatchingManager",
    "BeamComparison",
    "BeamDynamicCache",
    "BeamEncoderDecoderCache",
    "DynamicRingCache",
    "GrammarLogitsProcessor",
    "HammingDiversityLogitsProcessor",
    "LmdecodeConfig",
    "PackedLinearModule",
    "StaticRingCache",
    "TopKTopPLogitsProcessor",
    "beam_cache",
    "beam_search",
    "cache_from_kv",
    "cache_to_kv",
    "compare_with_transformers",
    "encoder_context",
    "expand_beams",
    "generate_batch",
    "generate_with_store",
    "load_cache",
    "load_quantized",
    "pack_linears_",
    "packed_from_awq",
    "packed_from_gptq",
    "prefill",
    "register",
    "reorder_beams",
    "sample",
]


def __getattr__(name: str) -> Any:
    # Imported on request: they derive from classes that only some releases have.
    if name in ("BatchingManager", "generate_batch"):
        from lmdecode.integrations.transformers.continuous_batching import batching_manager

        return getattr(batching_manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
