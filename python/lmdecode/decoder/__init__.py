"""Decoders of encoder-decoder models: the whole loop, a batch of requests, a single layer."""

from lmdecode.decoder.batch import DecodingBatch
from lmdecode.decoder.config import DecoderConfig, DecoderWeights, LayerWeights
from lmdecode.decoder.decoding import Decoding
from lmdecode.decoder.layer import DecoderLayer, gather_tree

__all__ = [
    "DecoderConfig",
    "DecoderLayer",
    "DecoderWeights",
    "Decoding",
    "DecodingBatch",
    "LayerWeights",
    "gather_tree",
]
