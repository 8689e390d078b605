"""``Decoding`` of transformers' models: their weights, their arguments of ``generate()``."""
