"""Sessions: the two answers of step, interleaving, resuming, forking, rewinding."""

from pathlib import Path

import pytest
from store_cases import Open, cache, same

from tests.support.processes import run_python

A, B = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 30, 31]


def test_the_first_token_and_a_continuation_need_no_query(open_store: Open) -> None:
    session = open_store().session("a")
    assert session.step([1]) == "continue"
    assert session.step([2, 3]) == "continue"
    assert session.tokens == [1, 2, 3]
    assert len(session) == 3


def test_a_switch_needs_a_query(open_store: Open) -> None:
    store = open_store()
    a, b = store.session("a"), store.session("b")
    assert a.step(A) == "continue"
    assert b.step(B) == "continue"  # the first of its session
    assert b.step([32]) == "continue"
    assert a.step([11]) == "query"  # the model holds b
    assert a.step([12]) == "continue"
    assert b.step([33]) == "query"
    assert store.session("a") is a


def test_interleaved_sessions_come_back_exactly(open_store: Open) -> None:
    store = open_store()
    sessions = {name: store.session(name) for name in "abc"}
    state = 1
    for turn in range(30):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        session = sessions["abc"[state >> 16 & 1 if turn % 5 else turn % 3]]
        known = len(session)
        answer = session.step([state >> 8 & 7, turn])
        if answer == "query":
            found, kv = session.resume(max_tokens=len(session) - 1)
            assert found == known
            assert same(kv, cache(session.tokens[:found]))
        assert session.commit(cache(session.tokens)) == len(session)


def test_a_session_is_resumed_by_another_process(open_store: Open, tmp_path: Path) -> None:
    with open_store() as store:
        session = store.session("chat")
        session.step(A)
        assert session.commit(cache(A)) == 10
        session.step([11, 12])  # interrupted before these were computed
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from store_cases import cache, fingerprint, same
from lmdecode.store import KVStore
from tests.support.processes import run_python
with KVStore({str(tmp_path / "store")!r}, fingerprint=fingerprint(), capacity_bytes=1 << 20) as s:
    session = s.session("chat")
    assert session.tokens == {A}
    assert session.step([20]) == "query"
    found, kv = session.resume()
    assert found == 10 and same(kv, cache({A}))
    assert session.step([21]) == "continue"
"""
    assert run_python("-c", code).returncode == 0


def test_tokens_that_were_not_computed_yet(open_store: Open) -> None:
    with open_store() as store:
        session = store.session("a")
        session.step(A)
        assert session.commit(cache(A[:-1])) == 9
    session = open_store().session("a")
    assert session.tokens == A
    assert session.resume()[0] == 9


def test_commit_in_the_background(open_store: Open) -> None:
    session = open_store().session("a")
    session.step(A)
    pending = session.commit(cache(A), background=True)
    session.step([11])
    assert not isinstance(pending, int)
    assert pending.result() == 10
    assert session.resume()[0] == 10


def test_rewind_and_fork(open_store: Open) -> None:
    with open_store() as store:
        session = store.session("a")
        session.step(A)
        session.commit(cache(A))
        branch = session.fork("b")
        assert branch.tokens == A
        session.rewind(4)
        assert session.tokens == A[:4]
        assert session.step([50]) == "query"
        found, kv = session.resume()
        assert found == 4
        assert same(kv, cache(A[:4]))
        assert branch.step([60]) == "query"
        assert branch.resume()[0] == 10
        with pytest.raises(ValueError, match="already"):
            session.fork("b")
        with pytest.raises(ValueError, match="rewind"):
            session.rewind(6)
    store = open_store()  # both are durable
    assert store.session("a").tokens == A[:4]
    assert store.session("b").tokens == A
    assert store.sessions() == [("a", 4), ("b", 10)]


def test_delete(open_store: Open) -> None:
    with open_store() as store:
        session = store.session("a")
        session.step(A)
        session.commit(cache(A))
        session.delete()
        assert session.tokens == []
    store = open_store()
    assert store.session("a").tokens == []
    assert store.sessions() == []
    assert store.lookup(A).num_tokens == 10  # keys and values stay until they are evicted


def test_sessions_of_other_tenants_and_contexts_are_others(open_store: Open) -> None:
    store = open_store()
    session = store.session("a")
    session.step(A)
    session.commit(cache(A))
    assert store.for_tenant("x").session("a").tokens == []
    assert store.session("a", context=b"image").tokens == []


def test_a_session_outlives_its_keys_and_values(open_store: Open) -> None:
    """A miss is no error: all tokens are there to be computed again."""
    store = open_store()
    store = open_store(path=Path(store._handle.directory).parent.parent / "small",
                       capacity_bytes=2 * store.slot_bytes)  # fmt: skip
    session = store.session("a")
    session.step(A)
    assert session.commit(cache(A)) == 10
    for n in range(3):
        store.put([100 + n], cache([100 + n]))
    found, kv = session.resume()
    assert (found, kv) == (0, None)
    assert session.tokens == A


def test_a_long_session(open_store: Open) -> None:
    """Its tokens are stored in blocks, and only those that changed are written again."""
    with open_store() as store:
        session = store.session("long")
        session.step([n % 97 for n in range(2500)])
        session.commit(cache(session.tokens[:8]), num_tokens=8)
        session.rewind(1500)
        session.step([5] * 700)
        session.commit(cache(session.tokens[:8]), num_tokens=8)
        tokens = session.tokens
    assert open_store().session("long").tokens == tokens


def test_a_long_name(open_store: Open) -> None:
    store = open_store()
    for name in ("n" * 300, "\u00e9" * 200):
        session = store.session(name)
        session.step(A)
        session.commit(cache(A))
    assert sorted(store.sessions()) == [("n" * 300, 10), ("\u00e9" * 200, 10)]


def test_wrong_commits(open_store: Open) -> None:
    session = open_store().session("a")
    session.step(A[:3])
    with pytest.raises(ValueError, match="session's 3"):
        session.commit(cache(A))


def test_wrong_tokens_leave_a_session_as_it_was(open_store: Open) -> None:
    store = open_store()
    session = store.session("chat")
    session.step([1, 2, 3])
    with pytest.raises(ValueError, match="step: token id -1; expected 0 or more"):
        session.step([4, -1])
    assert session.tokens == [1, 2, 3]
    assert session.commit(cache([1, 2, 3])) == 3
    for count in (-1, 4, 2**64):
        with pytest.raises(ValueError, match=f"commit: keys and values of {count} tokens"):
            session.commit(cache([1, 2, 3]), num_tokens=count)
    for wrong in (True, 2.0):
        with pytest.raises(TypeError, match="commit: num_tokens is of type"):
            session.commit(cache([1, 2, 3]), num_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resume: max_tokens is -1"):
        session.resume(-1)
