"""Runs mmengine's replicas on Ray Serve, and batches on Ray Data. Requires the extra `ray`.

    serve run mmengine_ray:app                        # the included checkpoint, one replica
    serve run mmengine_ray:app_of model=… replicas=3

Requests and answers travel between processes as bytes that `mmengine.fleet.wire` encodes. The receiver checks
the bytes against their types, so no request or answer is unpickled.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application


def app_of(args: dict[str, object]) -> "Application":
    """Return the application for `serve run` and config files of Serve. `args`: fields of RaySettings.

    Raises ConfigError.
    """
    from mmengine_ray.deployments import application  # lazy: importing Ray takes seconds
    from mmengine_ray.settings import RaySettings

    return application(RaySettings.of(args))


def __getattr__(name: str) -> "Application":
    if name == "app":
        return app_of({})
    raise AttributeError(name)
