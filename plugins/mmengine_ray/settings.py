"""The settings of a fleet on Ray Serve."""

from typing import Annotated

import msgspec
from msgspec import Meta

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.server.settings import ServerSettings

EMBEDDED_NAME = "mmengine-shapes"


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of the replicas and the ingress. Times are in seconds.

    Some defaults differ from Ray Serve's: a replica takes `max_open` calls instead of 5, each queue is
    bounded, and a draining replica ends after `drain_s`.
    """

    model: str | None = None  # None: the checkpoint in the package
    device: str = "auto"
    dtype: str = "auto"
    engine: EngineConfig = EngineConfig()
    log: str = ""  # folder with one log per replica process; "" for no logs
    replicas: Annotated[int, Meta(ge=1, le=4096)] = 1
    max_replicas: Annotated[int, Meta(ge=0, le=4096)] = 0  # limit for autoscaling; 0: no autoscaling
    # number of waiting prompt tokens per replica above which a replica is added
    waiting_tokens: Annotated[int, Meta(ge=1)] = 4096
    num_cpus: Annotated[float, Meta(gt=0)] = 1  # per replica, in Ray's units
    num_gpus: Annotated[float, Meta(ge=0)] = 0
    max_open: Annotated[int, Meta(ge=1, le=2**20)] = 1024  # maximum number of concurrent calls per replica
    beat_s: Annotated[float, Meta(ge=0.01, le=60)] = 1.0  # interval between heartbeats
    # time without a heartbeat after which a replica counts as lost
    silence_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    hang_s: Annotated[float, Meta(ge=0.1, le=86400)] = 60.0  # seconds after which a step counts as hung
    patience_s: Annotated[float, Meta(ge=1, le=86400)] = 120.0  # seconds that a request waits for a replica
    health_s: Annotated[float, Meta(ge=0.1, le=3600)] = 2.0  # interval of health checks
    # seconds that a draining replica waits for its requests
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 5.0
    names: tuple[str, ...] = ()  # the model's names in requests
    api_key_file: str = ""  # a file that the ingress can read; "": the variable MMENGINE_API_KEY is read
    builder: str = ""  # module:function that replaces mmengine.build.build, for tests and benchmarks
    server: ServerSettings = ServerSettings()

    @classmethod
    def of(cls, given: object) -> "RaySettings":
        """Convert a mapping to settings. Raises ConfigError."""
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"invalid fleet settings: {error}") from None

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> "RaySettings":
        return msgspec.json.decode(data, type=cls)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.names or self.server.served_model_names or (self.model or EMBEDDED_NAME,)
