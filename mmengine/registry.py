"""Registries for objects that settings choose by name: models, drafters, policies, grammar backends,
attention backends, block stores and devices.

A registry's entries are Python entry points. Other packages declare entries in the registry's group.
mmengine's own entries are listed in code, and no package can replace them. An entry is imported only when a
setting chooses it.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from typing import Generic, TypeVar

from mmengine.errors import ConfigError, MMEngineError, in_one_line
from mmengine.extras import install_hint

DISTRIBUTION = "mmengine-vl"  # the name of our own distribution

Thing = TypeVar("Thing")


def entry_points(*, group: str) -> EntryPoints:
    """Return `importlib.metadata.entry_points(group=group)`, cached until a folder in sys.path changes.

    The cache saves time, because building an engine calls this function six times.
    """
    folders = []
    for folder in sys.path:
        with suppress(OSError):
            folders.append((os.path.abspath(folder), os.stat(folder or ".").st_mtime_ns))
    return _installed(group, tuple(folders))


@lru_cache(maxsize=32)
def _installed(group: str, folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    return metadata.entry_points(group=group)


class Registry(Generic[Thing]):
    """The entry points of `group`, by name. `noun`: the word for an entry in messages, such as "policy".

    `own`: mmengine's own entries, name -> "module:attribute". A final "[extra]" names a required extra, as in
    an entry point. `beside`: further values that the setting accepts, for messages. `is_one`: returns whether
    an imported object is valid. `kind`: the noun for a valid object in messages, such as "callable".

    `error`: the exception class to raise. `unknown`: the message for an unknown name, with {name}, {noun} and
    {known}. `broken`: the message for an entry that cannot be imported, with {name}, {noun}, {value}, {error}
    (with the error's type), {reason} (without the type), {advice} (how to repair the entry) and {others} (the
    other names).
    """

    def __init__(
        self,
        group: str,
        noun: str,
        *,
        own: Mapping[str, str] | None = None,
        beside: Sequence[str] = (),
        kind: str = "callable",
        is_one: Callable[[object], bool] = callable,
        error: type[MMEngineError] = ConfigError,
        unknown: str = "there is no {noun} {name!r}; choose one of {known}",
        broken: str = "{noun} {name} cannot be loaded ({error}); {advice}, or choose another ({others})",
    ):
        self.group, self.noun = group, noun
        self._own = {name: EntryPoint(name, value, group) for name, value in (own or {}).items()}
        self._registered: dict[str, Thing] = {}
        self._beside, self._kind, self._is_one = beside, kind, is_one
        self._error, self._unknown, self._broken = error, unknown, broken

    def names(self) -> list[str]:
        """Return all names, starting with mmengine's own names."""
        strangers = {point.name for point in self.points()} | self._registered.keys()
        return [*self._own, *sorted(strangers - self._own.keys())]

    def points(self) -> list[EntryPoint]:
        """Return all entry points, starting with mmengine's own. Duplicates from several folders in sys.path
        are removed.
        """
        found = {(point.name, point.value): point for point in entry_points(group=self.group)}
        return [*self._own.values(), *(found[key] for key in sorted(found) if key[0] not in self._own)]

    def register(self, name: str, thing: Thing) -> None:
        """Register `thing` under `name` in this process. Raises `error` if another object has the name."""
        taken = self.load(name) if name in self._own else self._registered.get(name, thing)
        if taken is not thing:
            raise self._error(f"a {self.noun} is called {name!r} already; choose another name")
        self._registered[name] = thing

    def load(self, name: str) -> Thing:
        """Import and return the object called `name`. Raises `error` if no entry or several entries have this
        name, or if the entry cannot be imported or is not valid.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._own:
            return self.open(self._own[name])
        found = [point for point in self.points() if point.name == name]
        if not found:
            known = ", ".join([*self._beside, *self.names()])
            raise self._error(self._unknown.format(name=name, noun=self.noun, known=known))
        if len(found) > 1:
            claims = " and ".join(f"{point.value} ({_distribution(point)})" for point in found)
            raise self._error(f"the {self.noun} {name} is claimed by {claims}; uninstall one of them")
        return self.open(found[0])

    def open(self, point: EntryPoint) -> Thing:
        """Import and return the object of an entry point. Raises `error` if it cannot be imported or is not
        valid.
        """
        try:
            thing = point.load()
        except Exception as error:  # another package's module may raise any exception
            raise self._error(self._why_broken(point, error)) from error
        if not self._is_one(thing):
            raise self._error(f"the entry point {point.value} is no {self._kind}")
        return thing

    def _why_broken(self, point: EntryPoint, error: Exception) -> str:
        name = DISTRIBUTION if point.dist is None else point.dist.name
        if point.name in self._own or (point.extras and name == DISTRIBUTION):
            advice = install_hint(*(point.extras or ["engine"]))
        elif point.extras:
            extras = ",".join(point.extras)
            advice = f'pip install "{name}[{extras}]"'
        else:
            advice = f"update or uninstall {_distribution(point)}"
        others = ", ".join(name for name in self.names() if name != point.name)
        return self._broken.format(
            name=point.name,
            noun=self.noun,
            value=point.value,
            error=in_one_line(error),
            reason=in_one_line(error).partition(": ")[2],
            advice=advice,
            others=others,
        )


def _distribution(point: EntryPoint) -> str:
    """Return the distribution that declares the entry point, for a message."""
    return "the package that brings it" if point.dist is None else f"{point.dist.name} {point.dist.version}"
