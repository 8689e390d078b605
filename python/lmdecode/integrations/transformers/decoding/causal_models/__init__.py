"""Decoder-only models of transformers as a config and weights, read by a table.

``architecture`` defines an entry of the table, ``architectures`` is the table, and ``weights``
reads a model by its entry.
"""

from lmdecode.integrations.transformers.decoding.causal_models.architectures import (
    CAUSAL_MODEL_TYPES,
)
from lmdecode.integrations.transformers.decoding.causal_models.weights import (
    causal_model_of,
    refuse_rope_types,
)

__all__ = ["CAUSAL_MODEL_TYPES", "causal_model_of", "refuse_rope_types"]
