"""A Ray cluster for the tests that need one; starting it takes longer than the tests."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Two nodes of one core each."""
    pytest.importorskip("ray", reason="needs the extra paceline[ray]")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    before = os.environ.get("RAY_ADDRESS")
    try:
        made.add_node(**node)
        os.environ["RAY_ADDRESS"] = made.address
        yield made.address
    finally:
        made.shutdown()
        os.environ.pop("RAY_ADDRESS") if before is None else os.environ.update(RAY_ADDRESS=before)
