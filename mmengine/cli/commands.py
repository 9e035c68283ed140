"""How commands show their options, no type beside a flag, and what an unknown option may mean."""

from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup

from mmengine.errors import ConfigError

if TYPE_CHECKING:
    from typer._click import Context, Parameter

# Options of vLLM that are no setting of ours by their own name, and what is to be given here.
VLLMS = {
    "--gpu-memory-utilization": "the KV pool is sized by the memory that is free; "
    "--set num_blocks=N makes it N blocks of 16 tokens",
    "--max-num-batched-tokens": "the tokens of a step are --set token_budget=N",
    "--tensor-parallel-size": "give --tensor-parallel N",
    "--enforce-eager": "give --set cuda_graphs=false",
}


class Command(TyperCommand):
    """A command of ours."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        return _simply_shown(super().get_params(ctx))

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Raises ConfigError for an option that is none, and is known by another name."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer brings the parser's errors along, in one place or another
            option = getattr(error, "option_name", "")
            takes_settings = any("--set" in each.opts for each in self.params)
            if type(error).__name__ == "NoSuchOption" and takes_settings and (meant := _meant(option, given)):
                raise ConfigError(f"there is no option {option}; {meant}") from None
            raise


class Group(TyperGroup):
    """A group of commands of ours."""

    def get_params(self, ctx: "Context") -> "list[Parameter]":
        return _simply_shown(super().get_params(ctx))


def _simply_shown(options: "list[Parameter]") -> "list[Parameter]":
    for each in options:
        if getattr(each, "is_flag", False):
            each.metavar = ""
        elif each.param_type_name == "argument" and each.nargs != 1:  # its name has the dots already
            vars(each).update(display_type_rich=lambda ctx: "")
    return options


def _meant(option: str, given: list[str]) -> str:
    """What to give in place of an unknown option; "" where that is not known."""
    from mmengine.config import EngineConfig  # lazy: help needs no settings

    name = option.removeprefix("--").replace("-", "_")
    if option in VLLMS or name not in EngineConfig.__struct_fields__:
        return VLLMS.get(option, "")
    place = next(number for number, word in enumerate(given) if word.partition("=")[0] == option)
    _, equals, value = given[place].partition("=")
    if not equals:
        after = given[place + 1] if place + 1 < len(given) else "-"
        value = "VALUE" if after.startswith("-") else after
    return f"it is a setting of the engine: --set {name}={value}"
