"""KV caches that follow their beams: reordered, by an indirection, or in blocks."""

from lmdecode.kv_cache.blocks import BlockSlots, BlockTable, OutOfBlocksError, copy_blocks_
from lmdecode.kv_cache.indirection import BeamIndirection, gather_indirect, update_beam_indirection_
from lmdecode.kv_cache.reorder import reorder_cache_

__all__ = [
    "BeamIndirection",
    "BlockSlots",
    "BlockTable",
    "OutOfBlocksError",
    "copy_blocks_",
    "gather_indirect",
    "reorder_cache_",
    "update_beam_indirection_",
]
