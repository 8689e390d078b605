"""Linear layers of a transformers model, packed."""
