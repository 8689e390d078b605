"""Ray Data on a cluster of two nodes in one machine; a node is killed in the middle of a job."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ray_stand_in import KJV

pytest.importorskip("ray")

import ray
import ray.data

import lmdecode
from lmdecode.integrations.ray import Generate

COUNT = 48
PROMPTS = [f"And {number} the LORD said" if number % 3 else "In the" for number in range(COUNT)]
ARGUMENTS = {"max_new_tokens": 8, "do_sample": True, "top_p": 0.9, "seed": 5}


class Cluster:
    """Two nodes; actors run on the second one and, where that has no room, on the first."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Local

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.local = Local(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
        )
        self.second = self.local.add_node(num_cpus=2)
        variables = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(Path(__file__).parent),  # workers load this file
        }
        ray.init(
            address=self.local.address, log_to_driver=False, runtime_env={"env_vars": variables}
        )
        ray.data.DataContext.get_current().enable_progress_bars = False

    def close(self) -> None:
        ray.shutdown()
        self.local.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("packed") / "model"
    lmdecode.Decoding.from_pretrained(KJV, keep_model=False).save(folder)
    return str(folder)


class Watched(Generate):
    """Writes a file for each batch, with the node that ran it."""

    def __init__(self, folder: str, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._folder = Path(folder)

    def __call__(self, batch: Any) -> Any:
        time.sleep(0.2)  # so that the job has a middle
        output = super().__call__(batch)
        node = ray.get_runtime_context().get_node_id()
        name = "-".join(str(number) for number in batch["id"][:2])
        (self._folder / f"{node}.{name}.{time.monotonic_ns()}").touch()
        return output


def job(packed: str, folder: Path, batch_size: int, actors: int) -> list[dict[str, Any]]:
    rows = [{"id": number, "prompt": prompt} for number, prompt in enumerate(PROMPTS)]
    dataset = ray.data.from_items(rows, override_num_blocks=12).map_batches(
        Watched, fn_constructor_args=[str(folder), packed, KJV], fn_constructor_kwargs=ARGUMENTS,
        batch_size=batch_size, num_cpus=1, compute=ray.data.ActorPoolStrategy(size=actors),
    )  # fmt: skip
    found: list[dict[str, Any]] = dataset.take_all()
    return found


def expected(packed: str) -> dict[int, tuple[str, list[int]]]:
    import numpy as np

    output = Generate(packed, KJV, **ARGUMENTS)(  # type: ignore[arg-type]
        {"id": np.arange(COUNT), "prompt": np.array(PROMPTS, dtype=object)}
    )
    pairs = zip(output["text"], output["tokens"], strict=True)
    return {number: (text, list(tokens)) for number, (text, tokens) in enumerate(pairs)}


def check(found: list[dict[str, Any]], packed: str) -> None:
    assert sorted(row["id"] for row in found) == list(range(COUNT))  # nothing lost or doubled
    texts = {row["id"]: (row["text"], list(row["tokens"])) for row in found}
    assert texts == expected(packed)
    assert all(row["prompt"] == PROMPTS[row["id"]] for row in found)


def test_any_split_on_any_number_of_actors(cluster: Cluster, packed: str, tmp_path: Path) -> None:
    for batch_size, actors in ((5, 2), (16, 1), (48, 2)):
        check(job(packed, tmp_path, batch_size, actors), packed)


def test_a_node_that_is_killed_loses_and_doubles_nothing(
    cluster: Cluster, packed: str, tmp_path: Path
) -> None:
    node = cluster.second.node_id
    found: list[list[dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: found.append(job(packed, tmp_path, 2, 3)))
    thread.start()
    end = time.monotonic() + 120
    while time.monotonic() < end and not list(tmp_path.glob(f"{node}.*")):
        time.sleep(0.02)
    done = len(list(tmp_path.iterdir()))
    cluster.local.remove_node(cluster.second, allow_graceful=False)
    thread.join(240)
    assert not thread.is_alive()
    assert 0 < done < COUNT // 2  # in the middle
    check(found[0], packed)
