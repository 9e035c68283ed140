"""Groups of command options: a dataclass per group, whose fields are typer options."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import OptionInfo


def grouped(environment: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command the fields of its dataclass parameters as options, in order.

    `environment` is the prefix of the environment variables that set the same options; "" for none.
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


def _options(kind: type, environment: str) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        hint = hints[field.name]
        value, option = get_args(hint)
        if environment and isinstance(option, OptionInfo):
            option = copy.copy(option)  # Another command may use the option without a variable.
            option.envvar, option.show_envvar = environment + _name(option, field.name).upper(), False
            hint = Annotated[value, option]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _name(option: OptionInfo, name: str) -> str:
    """Return the flag's name, or the field's by default. In Annotated the first flag is the default."""
    flags = [each for each in (option.default, *(option.param_decls or ())) if isinstance(each, str)]
    return flags[0].removeprefix("--").replace("-", "_") if flags else name
