"""A persistent store of KV caches: a conversation goes on where it was left, after anything.

``KVStore`` keeps the keys and values of token prefixes on disk, finds the longest stored prefix of
new tokens, and loads it; ``Session`` follows one conversation. docs/reference/store.md says what is
guaranteed, and ``python -m lmdecode.store --help`` has the tools.
"""

from lmdecode.store.cost_model import CostModel
from lmdecode.store.errors import (
    FingerprintMismatchError,
    StoreDamagedError,
    StoreError,
    StoreLockedError,
)
from lmdecode.store.fingerprint import Fingerprint
from lmdecode.store.kv_store import KVStore, VerifyReport
from lmdecode.store.prefixes import Hit
from lmdecode.store.remote import Remote
from lmdecode.store.session import Session
from lmdecode.store.weights_mark import weights_mark

__all__ = [
    "CostModel",
    "Fingerprint",
    "FingerprintMismatchError",
    "Hit",
    "KVStore",
    "Remote",
    "Session",
    "StoreDamagedError",
    "StoreError",
    "StoreLockedError",
    "VerifyReport",
    "weights_mark",
]
