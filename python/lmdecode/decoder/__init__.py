"""Models in C++: decoder-only ones, decoders of encoder-decoder ones, a batch, a layer.

``lmdecode`` puts its ``Decoding`` here, too.
"""

from typing import Any

from lmdecode.decoder.batch import DecodingBatch
from lmdecode.decoder.causal_batch import CausalBatch
from lmdecode.decoder.layer import DecoderLayer, gather_tree
from lmdecode.models.configs import CausalConfig, DecoderConfig
from lmdecode.models.weights import CausalLayerWeights, CausalWeights, DecoderWeights, LayerWeights

Decoding: Any

__all__ = [
    "CausalBatch",
    "CausalConfig",
    "CausalLayerWeights",
    "CausalWeights",
    "DecoderConfig",
    "DecoderLayer",
    "DecoderWeights",
    "Decoding",
    "DecodingBatch",
    "LayerWeights",
    "gather_tree",
]
