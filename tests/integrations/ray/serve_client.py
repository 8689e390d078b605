"""A cluster with Ray Serve, and a client of it."""

import http.client
import json
import os
import socket
from typing import Any

import ray
from ray import serve


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start_serve() -> int:
    """Start a cluster of one node, and return the port that answers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    variables = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        # A machine with other work takes longer to start the proxy, which would be killed.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    }
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": variables})  # fmt: skip
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    return port


def post(port: int, body: Any, timeout: float = 120.0, path: str = "") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", f"{path}/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})  # fmt: skip
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content.startswith(b"{") else content
