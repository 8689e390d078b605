"""Model files that are not transformers' own: GGUF."""
