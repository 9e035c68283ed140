"""The names by which calls ask for the model, or for one of its LoRA adapters."""

from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.http.errors import not_served


class ModelNames:
    """`own`: of the model, the first one for calls that name none."""

    def __init__(self, own: tuple[str, ...], engine: ServedEngine):
        self.own, self._engine = own, engine

    @property
    def of_adapters(self) -> tuple[str, ...]:
        return tuple(known.adapter.name for known in self._engine.adapters)

    @property
    def every(self) -> tuple[str, ...]:
        return (*self.own, *self.of_adapters)

    def served(self, given: str | None) -> tuple[str, str]:
        """The name that a call asks for, and of which adapter that is, "" of the model itself. Raises
        ApiError for one that is not here."""
        if not given or given in self.own:
            return given or self.own[0], ""
        if given in self.of_adapters:
            return given, given
        raise not_served(given, self.every)
