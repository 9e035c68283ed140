"""Replicas on Ray Serve behind the server of mmengine, and batches on Ray Data. Needs the extra `ray`.

    serve run mmengine_ray:app                        # the embedded checkpoint, one replica
    serve run mmengine_ray:app_of model=… replicas=3

Whatever crosses between processes is bytes of `mmengine.fleet.wire`, which are held to their types: Ray's own
pickles carry nothing else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application


def app_of(args: dict[str, object]) -> "Application":
    """The application for `serve run` and a config file of Serve. `args`: fields of RaySettings. Raises
    ConfigError."""
    from mmengine_ray.deployments import application  # lazy: Ray takes seconds
    from mmengine_ray.settings import RaySettings

    return application(RaySettings.of(args))


def __getattr__(name: str) -> "Application":
    if name == "app":
        return app_of({})
    raise AttributeError(name)
