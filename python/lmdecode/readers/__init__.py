"""What reads a model of files or of transformers as a config and weights, and its tokenizer."""
