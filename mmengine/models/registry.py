"""Finds the plugin for a model by the model's architecture.

Plugins are entry points in the group `mmengine.models`, including mmengine's own plugins. A fallback plugin,
which runs transformers' modules, serves architectures that no other plugin supports, and folders whose config
the architecture's plugin refuses.
"""

from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from mmengine.checkpoint.model_files import has_model_file, is_gguf, read_model_json
from mmengine.errors import ModelError
from mmengine.models.plugin import ModelPlugin, ModelSpec
from mmengine.registry import Registry

CONFIG = "config.json"
PLUGINS: Registry[ModelPlugin] = Registry(
    "mmengine.models",
    "model plugin",
    kind="ModelPlugin",
    is_one=lambda found: hasattr(found, "architectures"),
    error=ModelError,
    broken="the model plugin {name} ({value}) does not load: {reason}; {advice}",
)
FALLBACK = "transformers"
FALLBACKS: Registry["FallbackPlugin"] = Registry(
    "mmengine.fallback_models",
    "model implementation",
    own={FALLBACK: "mmengine_transformers:plugin [transformers]"},
    kind="FallbackPlugin",
    is_one=lambda found: hasattr(found, "check"),
    error=ModelError,
)
ModelImpl = Literal["auto", "native", "transformers"]


class FallbackPlugin(ModelPlugin, Protocol):
    """The protocol for the fallback plugin, which has no list of architectures."""

    def check(self, folder: Path) -> None:
        """Raise ModelError, with the reason, if the plugin cannot serve the model in `folder`."""

    def describe(self, folder: Path) -> ModelSpec:
        """See ModelPlugin."""


class Choice(NamedTuple):
    """A model's plugin. `refusal`: why the architecture's own plugin does not serve the model, or ""."""

    plugin: ModelPlugin
    refusal: str


def plugin_for(folder: Path, impl: ModelImpl = "auto") -> ModelPlugin:
    """Return the plugin that `choose_plugin` chooses."""
    return choose_plugin(folder, impl).plugin


def choose_plugin(folder: Path, impl: ModelImpl = "auto") -> Choice:
    """Return the plugin that serves the `architectures` in a folder's config.json or in a GGUF file.

    `impl`: "native" requires a plugin that supports the architecture. "transformers" selects the fallback.
    "auto" selects the fallback if no plugin supports the architecture, or if the plugin refuses a folder's
    config (a sliding window, for example) and the fallback does not. Raises ModelError if the folder is
    missing or has no model, if config.json is broken, or if the architecture is not served.
    """
    architectures = _architectures(folder)
    plugins = load_plugins()
    described = next((plugins[name] for name in architectures if name in plugins), None)
    if described is not None and impl == "native":
        return Choice(described, "")
    if described is not None and impl == "auto":
        return _described_or_fallback(described, folder)
    if not plugins:
        raise ModelError(
            f'no model plugin is installed: nothing registers an entry point in the group "{PLUGINS.group}"; '
            "install mmengine again"
        )
    if impl != "native":
        return Choice(_fallback_for(folder), "")
    article = "an" if architectures[0][:1].lower() in "aeiou" else "a"
    raise ModelError(
        f"{folder} is {article} {', '.join(architectures)}; mmengine serves {', '.join(sorted(plugins))}"
    )


def _described_or_fallback(described: ModelPlugin, folder: Path) -> Choice:
    """Return `described`, or the fallback if only the fallback can serve the config."""
    describe = getattr(described, "describe", None)
    if describe is None or is_gguf(folder):
        return Choice(described, "")
    try:
        describe(folder)
    except ModelError as refusal:
        try:
            fallback = _fallback_for(folder)
            fallback.describe(folder)
        except ModelError:
            return Choice(described, "")  # Loading raises the plugin's error.
        return Choice(fallback, refusal.text)
    return Choice(described, "")


def _fallback_for(folder: Path) -> FallbackPlugin:
    fallback = FALLBACKS.load(FALLBACK)
    fallback.check(folder)
    return fallback


@lru_cache(maxsize=1)
def load_plugins() -> dict[str, ModelPlugin]:
    """Return architecture -> plugin. Raises ModelError if two plugins claim the same architecture."""
    plugins: dict[str, ModelPlugin] = {}
    owners: dict[str, str] = {}
    for point in PLUGINS.points():
        plugin, owner = PLUGINS.open(point), f"{point.name} ({point.value})"
        for architecture in plugin.architectures:
            if architecture in plugins:
                raise ModelError(
                    f"the model plugins {owners[architecture]} and {owner} both claim "
                    f"{architecture}; uninstall one of them"
                )
            plugins[architecture] = plugin
            owners[architecture] = owner
    return plugins


def _architectures(folder: Path) -> tuple[str, ...]:
    if not folder.exists() and not is_gguf(folder):
        raise ModelError(f"there is no model folder {folder}")
    path = folder / CONFIG
    if not has_model_file(folder, CONFIG):
        packed = min((each.name for each in folder.glob("*.gguf")), default=None)
        advice = f"; give one of its GGUF files, such as {packed}" if packed else ""
        raise ModelError(f"{folder} is not a model folder: it has no config.json{advice}")
    names = read_model_json(folder, CONFIG).get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ModelError(f'{path} names no architecture: "architectures" must be a list of names')
    return tuple(name[:100] for name in names[:8])
