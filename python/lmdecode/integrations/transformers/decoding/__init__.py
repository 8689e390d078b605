"""``Decoding`` of transformers' models: weights, and arguments of ``generate()``."""
