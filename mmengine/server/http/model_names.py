"""Finds the model or LoRA adapter for the model name in a call."""

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.http.errors import unknown_model_error


class ModelNames:
    """The served names of the model and its adapters. `model_names`: the model's names, default first."""

    def __init__(self, model_names: tuple[str, ...], engine: ServedEngine):
        self.model_names, self._engine = model_names, engine

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(known.adapter.name for known in self._engine.adapters)

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.model_names, *self.adapter_names)

    def resolve(self, given: str | None) -> tuple[str, str]:
        """Return a call's served model name, and the adapter's name ("" for the base model). `given`: the
        call's model name, or None or "" for the default. Raises ApiError for an unknown name.
        """
        if not given or given in self.model_names:
            return given or self.model_names[0], ""
        if given in self.adapter_names:
            return given, given
        raise unknown_model_error(given, self.all_names)
