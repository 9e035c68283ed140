"""The names by which calls ask for the model, or for one of its LoRA adapters."""

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.http.errors import unknown_model_error


class ModelNames:
    """`model_names`: of the model, the first one for calls that name none."""

    def __init__(self, model_names: tuple[str, ...], engine: ServedEngine):
        self.model_names, self._engine = model_names, engine

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(known.adapter.name for known in self._engine.adapters)

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.model_names, *self.adapter_names)

    def resolve(self, given: str | None) -> tuple[str, str]:
        """The name that a call asks for, and of which adapter that is, "" of the model itself. Raises
        ApiError for one that is not here."""
        if not given or given in self.model_names:
            return given or self.model_names[0], ""
        if given in self.adapter_names:
            return given, given
        raise unknown_model_error(given, self.all_names)
