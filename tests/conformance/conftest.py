"""One Ray for all conformance tests: starting it takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Generator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Generator[str]:
    """Address of a Ray on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def ray_here(ray_cluster: str) -> str:
    """This process is a driver of that Ray."""
    import ray

    if not ray.is_initialized():
        ray.init(address=ray_cluster, logging_level=logging.ERROR, log_to_driver=False)
    return ray_cluster
