"""Groups the options of a command in dataclasses, whose fields are typer options."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import reduce, wraps
from operator import or_
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.models import OptionInfo

_Group = TypeVar("_Group")


def grouped(environment: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for commands whose parameters are dataclasses. The dataclasses' fields become the
    command's options, in order.

    `environment`: prefix of environment variables that also set the options; "" for no variables.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        groups = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}

        @wraps(command)
        def with_options(**values: Any) -> None:
            given = {
                name: kind(**{field.name: values[field.name] for field in fields(kind)})
                for name, kind in groups.items()
            }
            command(**given)

        options = [option for kind in groups.values() for option in _options(kind, environment)]
        vars(with_options).update(__signature__=inspect.Signature(options), __annotations__={})
        return with_options

    return decorate


def from_settings(
    struct: type[msgspec.Struct], panel: str, *names: str
) -> Callable[[type[_Group]], type[_Group]]:
    """Return a class decorator that makes an option group. The options are the settings `names` in `struct`,
    then the fields of the decorated class.

    An option has the type, default and help text of its setting. `panel`: the heading of the group in the
    help.
    """
    hints = get_type_hints(struct, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}

    def decorate(group: type[_Group]) -> type[_Group]:
        options: dict[str, Any] = {}
        for name in names:
            value, *metas = get_args(hints[name])
            flags = [f"--{name.replace('_', '-')}"] if value is bool else []
            option = typer.Option(*flags, rich_help_panel=panel, help=metas[-1].description.replace("`", ""))
            options[name] = Annotated[_plain(value), option]
            setattr(group, name, defaults[name])
        group.__annotations__ = options | group.__annotations__
        return dataclass(frozen=True, slots=True)(group)

    return decorate


def _plain(hint: Any) -> Any:
    """Return a type without msgspec's ranges, which typer does not support."""
    if hasattr(hint, "__metadata__"):
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return reduce(or_, (_plain(each) for each in get_args(hint)))
    return hint


def _options(kind: type, environment: str) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        hint = hints[field.name]
        value, option = get_args(hint)
        if environment and isinstance(option, OptionInfo):
            # Copy the option, because another command may use the option without a variable.
            option = copy.copy(option)
            option.envvar, option.show_envvar = environment + _name(option, field.name).upper(), False
            hint = Annotated[value, option]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _name(option: OptionInfo, name: str) -> str:
    """Return the name of the first flag, or the field's name if there are no flags. For an option in
    Annotated, typer stores the first flag in `default`.
    """
    flags = [each for each in (option.default, *(option.param_decls or ())) if isinstance(each, str)]
    return flags[0].removeprefix("--").replace("-", "_") if flags else name
