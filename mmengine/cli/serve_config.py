"""Reads the options of `mmengine serve` from a YAML file (--config), and the model from the command line."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mmengine.bounded_files import read_bounded
from mmengine.cli.run_options import Model
from mmengine.errors import ConfigError
from mmengine.extras import install_hint

NEEDED = ("starlette", "uvicorn", "uvloop", "httptools", "yaml", "python_multipart")
MAX_CONFIG_BYTES = 2**20  # Maximum size of the --config file.


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the options in a YAML file as defaults of the command. Raises ConfigError."""
    if path is None:
        return None
    check_installed()
    import yaml  # Lazy: only with --config

    try:
        data = read_bounded(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    try:
        found = yaml.safe_load(data)
    # Invalid dates raise ValueError, and deeply nested lists raise RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--config {path} is not valid YAML") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} must contain lines of option: value, such as port: 8000")
    options_of = [each for each in context.command.params if each.param_type_name == "option"]
    known = {opt.lstrip("-"): each for each in options_of for opt in each.opts}
    options = {}
    for given, value in found.items():
        name = str(given).replace("_", "-")
        if name not in known or name in ("config", "help"):
            advice = _advice(str(given), known) or "see mmengine serve --help"
            raise ConfigError(f"--config {path}: unknown option {str(given)!r}; {advice}")
        option = known[name]
        options[option.name] = _several(value) if getattr(option, "multiple", False) else value
    context.default_map = options
    return path


def _advice(given: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown option, or "" if no known option is similar."""
    from mmengine.config import EngineConfig  # Lazy: msgspec
    from mmengine.setting_names import advice_for

    name = given.replace("-", "_")
    if name in EngineConfig.__struct_fields__:
        return f"it is a setting of the engine: set: {{{name}: VALUE}}"
    return advice_for(name, [each.replace("-", "_") for each in known], is_command_line=True)


def _several(value: object) -> list[str]:
    """Return the values of a repeatable option from YAML: a single value, a list, or a mapping for --set."""
    if isinstance(value, dict):
        return [f"{name}={_word(each)}" for name, each in value.items()]
    return [_word(each) for each in (value if isinstance(value, list) else [value])]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Config:
    """The option --config."""

    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with options.", is_eager=True, callback=read_config),
    ] = None


@dataclass(frozen=True, slots=True)
class Named:
    """The model, as a positional argument."""

    first: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model, as in --model.", show_default=False),
    ] = None

    def of(self, model: Model) -> Model:
        """Return `model` with the positional model. Raises ConfigError if --model names another model."""
        if self.first is None:
            return model
        if model.model not in (None, self.first):
            raise ConfigError(
                f"serve {self.first!r:.80} and --model {model.model!r:.80} (or MMENGINE_MODEL, or --config) "
                "name different models; name only one"
            )
        return replace(model, model=self.first)


def check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"mmengine serve needs {', '.join(missing)}: {install_hint('serve')}")
