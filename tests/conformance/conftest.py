"""One Ray for all conformance tests: starting it takes seconds."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Generator[Any]:
    """A Ray on this machine, to which nodes can be added."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def ray_here(ray_cluster: Any) -> str:
    """This process is a driver of that Ray."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address=ray_cluster.address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}},
        )
    return ray_cluster.address
