"""Transports bytes between ingress and replicas with Ray's streaming calls."""

from collections.abc import AsyncGenerator

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from mmengine.errors import QueueFull
from mmengine.fleet.attempt import ReplicaLost
from mmengine_ray import router


class RayCarrier:
    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas

    def is_leaving(self, replica: str) -> bool:
        return router.is_leaving(replica)

    async def call(self, key: str, data: bytes) -> AsyncGenerator[bytes, None]:
        words = self._replicas.options(stream=True, session_id=key).run.remote(data)
        try:
            async for word in words:
                yield word
        except BackPressureError:
            raise QueueFull("all replicas and the queue in front of them are full: try again later") from None
        except (RayError, RayServeException) as error:
            raise ReplicaLost(type(error).__name__) from None
        finally:
            words.cancel()
