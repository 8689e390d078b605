"""Every op of lmdecode again in plain torch: the specification in code, the oracle of the tests.

The functions here are slow and simple. They give the same bits as the ops wherever the
specification promises bits.
"""

from lmdecode.reference.arithmetic import (
    exponential_noise,
    mass_threshold,
    philox,
    token_mass,
    token_noise,
    token_weight,
)
from lmdecode.reference.attention import (
    compressed_swa_mask,
    expand_compressed_swa_mask,
    merge_attention_states,
    sliding_window_attention,
    sliding_window_decode,
    swa_mask,
)
from lmdecode.reference.beam import log_softmax_top_k, trie_build, trie_step
from lmdecode.reference.beam_rules import beam_finalize, beam_step
from lmdecode.reference.drafts import prompt_lookup
from lmdecode.reference.kv_cache import (
    block_table_append_,
    block_table_reorder_,
    copy_blocks_,
    gather_indirect,
    reorder_cache_,
    ring_cache_append_,
    update_beam_indirection_,
)
from lmdecode.reference.linear import (
    layer_norm,
    packed_linear,
    packed_quantized_linear,
    quantize_groups,
    quantize_rows,
    rms_norm,
    rotate_rows,
    tile_product,
)
from lmdecode.reference.sampling import top_k_top_p_sample

__all__ = [
    "beam_finalize",
    "beam_step",
    "block_table_append_",
    "block_table_reorder_",
    "compressed_swa_mask",
    "copy_blocks_",
    "expand_compressed_swa_mask",
    "exponential_noise",
    "gather_indirect",
    "layer_norm",
    "log_softmax_top_k",
    "mass_threshold",
    "merge_attention_states",
    "packed_linear",
    "packed_quantized_linear",
    "philox",
    "prompt_lookup",
    "quantize_groups",
    "quantize_rows",
    "reorder_cache_",
    "ring_cache_append_",
    "rms_norm",
    "rotate_rows",
    "sliding_window_attention",
    "sliding_window_decode",
    "swa_mask",
    "tile_product",
    "token_mass",
    "token_noise",
    "token_weight",
    "top_k_top_p_sample",
    "trie_build",
    "trie_step",
    "update_beam_indirection_",
]
