"""Command classes for typer that improve help and errors."""

from shutil import get_terminal_size
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

from mmengine.errors import ConfigError

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter

WIDE_COLUMNS = 100  # Narrower terminals have no space for a column of types.


class Command(TyperCommand):
    """A command whose help shows no type for a flag, and whose errors explain unknown options."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        return _simply_shown(super().get_params(ctx))

    def format_help(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Print the help. A narrow terminal shows no column of types."""
        options = self.get_params(ctx)
        wide = [dict(vars(each)) for each in options]
        if get_terminal_size().columns < WIDE_COLUMNS:
            for each in options:
                _narrow(each, ctx)
        super().format_help(ctx, formatter)
        for each, values in zip(options, wide):  # Restore the types for help on a wide terminal.
            vars(each).clear()
            vars(each).update(values)

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Parse the options. Raises ConfigError for two arguments to `mmengine run`, and for an unknown
        option if `_meant` has advice.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # The error class's module depends on typer's version.
            option = getattr(error, "option_name", "")
            takes_settings = any("--set" in each.opts for each in self.params)
            if type(error).__name__ == "NoSuchOption" and takes_settings and (meant := _meant(option, given)):
                raise ConfigError(f"unknown option {option}; {meant}") from None
            if type(error).__name__ == "UsageError" and ctx.info_name == "run":  # Two arguments were given.
                text = 'run takes one question; name the model with --model: mmengine run "…" --model MODEL'
                raise ConfigError(text) from None
            raise


def _narrow(option: "Parameter", ctx: "Context") -> None:
    """Hide the option's type in help, but keep a metavar. A choice's values are appended to the help text."""
    if getattr(option, "metavar", None):
        return
    shown = getattr(option, "display_type_rich", lambda ctx: None)(ctx) or ""
    text = getattr(option, "help", None) or ""
    if "|" in shown:
        text += f" One of: {', '.join(shown.strip('<>[]').split('|'))}."
    vars(option).update(display_type_rich=lambda ctx: "", help=text)


class Group(TyperGroup):
    """A command group whose help shows no type for a flag."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        return _simply_shown(super().get_params(ctx))


def _simply_shown(options: "list[Parameter]") -> "list[Parameter]":
    for each in options:
        if getattr(each, "is_flag", False):
            each.metavar = ""
        # Hide the type, because the argument's name already ends with dots.
        elif each.param_type_name == "argument" and each.nargs != 1:
            vars(each).update(display_type_rich=lambda ctx: "")
    return options


def _meant(option: str, given: list[str]) -> str:
    """Return advice for an unknown option, or "" if there is none."""
    from mmengine.config import EngineConfig  # Lazy: help needs no settings
    from mmengine.setting_names import FOREIGN, advice_for

    name = option.removeprefix("--").replace("-", "_")
    if name in FOREIGN:
        return advice_for(name, is_command_line=True)
    if name not in EngineConfig.__struct_fields__:
        return ""
    place = next(number for number, word in enumerate(given) if word.partition("=")[0] == option)
    _, equals, value = given[place].partition("=")
    if not equals:
        after = given[place + 1] if place + 1 < len(given) else "-"
        value = "VALUE" if after.startswith("-") else after
    return f"it is a setting of the engine: --set {name}={value}"
