"""Uses an lmdecode installed from a wheel, beside torch alone, and prints what it ran with."""

import sys
import tempfile
from pathlib import Path

import torch

import lmdecode
from lmdecode import reference
from lmdecode.store import Fingerprint, KVStore


def check_sampling() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    options = {"temperature": 0.8, "seed": 7, "position": 3}
    sampled = lmdecode.top_k_top_p_sample(logits, 50, 0.9, **options)
    expected = reference.top_k_top_p_sample(logits, 50, 0.9, **options)
    assert torch.equal(sampled.index, expected.index)


def check_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 33, 16, generator=torch.Generator().manual_seed(2))
    seen = lmdecode.sliding_window_attention(q, k, v, window=8)
    torch.testing.assert_close(seen, reference.sliding_window_attention(q, k, v, window=8))


def check_beam_search() -> None:
    """With as many beams as tokens, the best two tokens after a token are found."""
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    search = lmdecode.BeamSearch()
    search.insert(lmdecode.BeamRequest([4], max_new_tokens=2, num_beams=6, length_penalty=0.0))
    out = search.step(table[[4]])
    out = search.step(table[out.tokens])
    (result,) = search.pop_finished()
    scores = table[4, :, None] + table
    assert result.sequences[0, 1:].tolist() == list(divmod(int(scores.argmax()), 6))
    torch.testing.assert_close(float(result.scores[0]), float(scores.max()))


def check_store() -> None:
    facts = {"num_layers": 1, "num_kv_heads": 1, "head_size": 4}
    fingerprint = Fingerprint(model_id="m", weights_hash="1", dtype="float32", **facts)
    kv = [(torch.randn(1, 4, 4), torch.randn(1, 4, 4))]
    options = {"fingerprint": fingerprint, "capacity_bytes": 1 << 24}
    with tempfile.TemporaryDirectory() as folder:
        with KVStore(folder, **options) as store:
            assert store.put([5, 9, 2, 7], kv) == 4
        with KVStore(folder, **options) as store:
            loaded = store.load(store.lookup([5, 9, 2, 1]))
    assert torch.equal(loaded[0][0], kv[0][0][:, :3])
    assert torch.equal(loaded[0][1], kv[0][1][:, :3])


def check_errors() -> None:
    """An exception of the library's C++ keeps its type on its way through torch."""
    try:
        torch.ops.lmdecode.reorder_cache_([torch.zeros(2, 2)], torch.tensor([0, 5]), 0, None, None)
    except ValueError as error:
        assert "parents[1] is 5" in str(error)
    else:
        raise AssertionError("no error")


def main() -> None:
    home = Path(lmdecode.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), home
    check_sampling()
    check_attention()
    check_beam_search()
    check_store()
    check_errors()
    print("lmdecode", lmdecode.__version__, lmdecode.cpu_capability())
    print("torch", torch.__version__)


if __name__ == "__main__":
    main()
