"""``python -m lmdecode.integrations.transformers.store PATH MODEL``: why a model finds nothing."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from lmdecode.store.__main__ import print_differences, stores_of
from lmdecode.store.errors import StoreError
from lmdecode.store.fingerprint import Fingerprint, hash_vocabulary


def main(argv: list[str] | None = None) -> int:
    """Print in what a model's fingerprints differ from those of a store; 1 where that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m lmdecode.integrations.transformers.store",
        description="Say in what the fingerprints of a model, with and without its tokenizer, "
        "differ from those of a store.",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="directory of the store")
    parser.add_argument("model", metavar="MODEL", help="as of from_pretrained")
    arguments = parser.parse_args(argv)
    try:
        stores = stores_of(arguments.path)
        one = Fingerprint.from_model(AutoModelForCausalLM.from_pretrained(arguments.model))
        vocabulary = hash_vocabulary(AutoTokenizer.from_pretrained(arguments.model))
    except (StoreError, OSError, ValueError) as error:
        print(f"lmdecode.store: {error}", file=sys.stderr)
        return 1
    others = []
    for other, how in ((one, "without"), (replace(one, tokenizer_hash=vocabulary), "with")):
        there = "" if (arguments.path / other.name).exists() else ", nothing stored"
        others.append((f"{arguments.model} {how} its tokenizer{there}", other))
    print_differences(stores, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
