"""What a model is: its config, its weights, and both packed in one memory."""
