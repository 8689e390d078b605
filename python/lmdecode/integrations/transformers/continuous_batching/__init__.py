"""``generate_batch``, transformers' continuous batching, with lmdecode's attention and sampler.

Its classes inherit from those of transformers, which change from release to release.
"""

import transformers

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 23):
    raise ImportError(
        f"generate_batch: transformers is {transformers.__version__}; expected 5.23 or later, "
        "whose continuous batching it is made for"
    )
