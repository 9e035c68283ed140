"""The checks that `mmengine serve` makes before it loads a model. Each error names the option to change."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mmengine.cli.run_options import Model
from mmengine.errors import ConfigError, InvalidRequest
from mmengine.extras import install_hint

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.server.http.auth import ApiKeys
    from mmengine.server.settings import ServerSettings

EMBEDDED_NAME = "mmengine-shapes"


def check_loras(model: Model, settings: "ServerSettings", admin_keys: "ApiKeys") -> None:
    """Raise ConfigError if an adapter has the model's name, or if --lora-root is set without an admin key."""
    own = settings.served_model_names or (model.model or EMBEDDED_NAME,)
    if conflicts := sorted(set(own) & model.loras().keys()):
        raise ConfigError(
            f"--lora uses the model's name {conflicts[0]!r:.80} for an adapter; choose another name"
        )
    if settings.lora_root and not admin_keys.any:
        raise ConfigError("--lora-root needs an admin key; give --admin-key-file")


def check_tracing(settings: "ServerSettings") -> None:
    """Raise ConfigError if an OTLP endpoint is set but OpenTelemetry is not installed."""
    if not settings.otlp_traces_endpoint:
        return
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http") and find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry: {install_hint('tracing')}")


def check_template(model: str | None, path: Path, source: str) -> None:
    """Raise ConfigError if the model's processor cannot use the template. Loads the processor, but no
    weights.
    """
    from mmengine.models.loader import resolve_folder  # Lazy: help needs no models
    from mmengine.models.registry import plugin_for

    folder = resolve_folder(model)
    processor = plugin_for(folder).load_processor(folder)
    try:
        processor.call_format({"chat_template": source})
    except InvalidRequest as error:
        raise ConfigError(f"--chat-template {path} is not a valid template: {error}") from None
