"""Old names of modules that documents told of: what they held is found where it is now, with a warning."""

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "mmengine.core.evolve": "mmengine.core.fold.evolve",
    "mmengine.core.past": "mmengine.core.resume",
    "mmengine.core.policy": "mmengine.core.state.policy",
    "mmengine.core.request_state": "mmengine.core.state.request_state",
    "mmengine.core.simulate": "mmengine.simulation.slots",
    "mmengine.serve.client": "mmengine.serve.async_engine.async_engine",
}


class MovedFinder(MetaPathFinder, Loader):
    """Asked last, and only for what no file is found for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        name = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is {name} now", DeprecationWarning, stacklevel=2)
        module.__dict__["__getattr__"] = partial(getattr, import_module(name))


def find_moved_modules() -> None:
    """Let `import` know the old names."""
    sys.meta_path.append(MovedFinder())
