"""Settings of a fleet on Ray Serve."""

from typing import Annotated

import msgspec
from msgspec import Meta

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.server.settings import ServerSettings

EMBEDDED_NAME = "mmengine-shapes"


class RaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Times are in seconds. What Serve has other defaults for, which hurt an engine, is set from here: a
    replica takes `max_open` calls and not 5, no queue is endless, one that drains is let go of at once."""

    model: str | None = None  # None: the embedded checkpoint
    device: str = "auto"
    dtype: str = "auto"
    engine: EngineConfig = EngineConfig()
    log: str = ""  # the folder below which each life of a replica has its log; "": none has one
    replicas: Annotated[int, Meta(ge=1, le=4096)] = 1
    max_replicas: Annotated[int, Meta(ge=0, le=4096)] = 0  # autoscaling up to so many; 0: none
    waiting_tokens: Annotated[int, Meta(ge=1)] = 4096  # of prompts, for each replica, before one is added
    num_cpus: Annotated[float, Meta(gt=0)] = 1  # of a replica, as Ray counts
    num_gpus: Annotated[float, Meta(ge=0)] = 0
    max_open: Annotated[int, Meta(ge=1, le=2**20)] = 1024  # calls that a replica may have at once
    beat_s: Annotated[float, Meta(ge=0.01, le=60)] = 1.0  # between a replica's signs of life
    silence_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0  # after which it is given up
    hang_s: Annotated[float, Meta(ge=0.1, le=86400)] = 60.0  # a step that takes longer hangs
    patience_s: Annotated[float, Meta(ge=1, le=86400)] = 120.0  # that a request waits for a replica
    health_s: Annotated[float, Meta(ge=0.1, le=3600)] = 2.0  # between looks at a replica's health
    drain_s: Annotated[float, Meta(ge=0, le=86400)] = 5.0  # that a replica lives on without requests
    names: tuple[str, ...] = ()  # by which calls ask for the model
    api_key_file: str = ""  # that an ingress can read; or MMENGINE_API_KEY there
    builder: str = ""  # module:function in place of mmengine.build.build, for tests and benchmarks
    server: ServerSettings = ServerSettings()

    @classmethod
    def of(cls, given: object) -> "RaySettings":
        """Raises ConfigError."""
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"a setting of the fleet is wrong: {error}") from None

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> "RaySettings":
        return msgspec.json.decode(data, type=cls)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.names or self.server.served_model_names or (self.model or EMBEDDED_NAME,)
