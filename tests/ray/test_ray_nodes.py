"""Tests that clients notice nothing when a cluster node and its replicas are lost."""

import asyncio

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make ray makes an environment with it")

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from mmengine_ray.deployments import application  # noqa: E402
from tests.ray.fleets import all_told, free_port, replicas, settings_for  # noqa: E402

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
HERE = "127.0.0.1"


def test_a_node_is_removed_in_the_middle(tmp_path, monkeypatch):
    # Ray would replace the loopback address by a network address that may be unreachable.
    monkeypatch.setattr(ray._private.services, "get_node_ip_address", lambda *given: HERE)
    store = 80 * 2**20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": store, "node_ip_address": HERE},
    )
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=store, node_ip_address=HERE) for _ in range(2)]
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(settings_for(tmp_path, replicas=3, num_cpus=0.9)))

        async def remove():
            await asyncio.sleep(0.7)
            await asyncio.to_thread(cluster.remove_node, nodes[0], allow_graceful=False)

        asyncio.run(replicas(3))
        wanted = asyncio.run(all_told(port, range(30)))
        assert asyncio.run(all_told(port, range(30), remove())) == wanted
        asyncio.run(replicas(2))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
