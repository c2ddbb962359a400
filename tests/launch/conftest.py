"""A Ray cluster for the tests that need one; starting it takes longer than the tests."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Two nodes of one core each."""
    pytest.importorskip("ray", reason="needs the extra paceline[ray]")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    folder = tempfile.mkdtemp(prefix="ray-")  # short: sockets' paths go below it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            made.add_node(**node)
            patch.setenv("RAY_ADDRESS", made.address)
            yield made.address
        finally:
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
