"""Handles the parts of a body that the server does not support. A lenient server ignores unsupported parts
and lists them in a response header. A strict server refuses the body.

Agents often send fields and hosted tools that only their vendor's servers support. Without these fields and
tools, an answer is still valid.
"""

from mmengine.server.http.errors import ApiError


class Unsupported:
    """The unsupported parts of a body. `is_lenient`: whether these parts are ignored. Otherwise the first
    unsupported part raises an error.

    `names`: the ignored parts, for the header that lists ignored fields.
    """

    def __init__(self, names: list[str], *, is_lenient: bool):
        self.names, self._is_lenient = names, is_lenient

    def leave_out(self, error: ApiError, detail: str = "") -> None:
        """Record that the part at the error's path is ignored. Raises `error` instead if the server is
        strict.
        """
        if not self._is_lenient:
            raise error
        self.names.append(f"{error.path} ({detail[:64]})" if detail else str(error.path))
