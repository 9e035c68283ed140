"""What a body asks for and the server cannot do: left out and named in a header, or refused.

Agents send fields and tools of their vendor's servers beside their own. An answer without them is still
valid.
"""

from mmengine.server.http.errors import ApiError


class Unsupported:
    """The unsupported parts of one body. `is_lenient`: leave them out; otherwise the first is refused.

    `names`: the parts that were left out, for the header with the ignored fields.
    """

    def __init__(self, names: list[str], *, is_lenient: bool):
        self.names, self._is_lenient = names, is_lenient

    def leave_out(self, error: ApiError, detail: str = "") -> None:
        """Note the part at the error's path. Raises `error` if the server is strict."""
        if not self._is_lenient:
            raise error
        self.names.append(f"{error.path} ({detail[:64]})" if detail else str(error.path))
