"""``python -m lmdecode.demo``: what the ops do inside ``generate()``, and how fast."""
