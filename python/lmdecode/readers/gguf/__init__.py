"""GGUF files: their metadata, weights and tokenizers."""
