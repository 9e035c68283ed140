"""Converts field paths in error messages to the paths in the client's body, for the Responses and Messages
APIs.

The server converts these bodies to a chat body, so errors name paths in the chat body. A table of path
prefixes maps these paths to the client's body.
"""

from typing import NamedTuple

from mmengine.errors import FieldPath

INDEX = None  # In a prefix, matches any index. In a replacement, inserts the matched index.
Prefix = tuple[str | None, ...]
Renames = tuple[tuple[Prefix, Prefix], ...]


class Place(NamedTuple):
    """A chat message's path in the client's body.

    `parts`: the paths of the message's first content parts. The path to any later part is `message`, then
    "content", then the part's index.
    """

    message: FieldPath
    parts: tuple[FieldPath, ...] = ()

    def part(self, number: int) -> FieldPath:
        return self.parts[number] if number < len(self.parts) else self.message / "content" / number


class FieldNames(NamedTuple):
    """Maps a chat body's field names to the client's field names.

    `places`: an entry for each chat message. `renames`: pairs of a chat path prefix and its replacement; the
    first match wins. `media`: the client's name for image_url and video_url, or "" if the client's body uses
    the chat names. `tools`: each chat tool's index in the client's body; empty if both bodies have the same
    indices. `allowed`: each allowed tool's index in the client's tool_choice; empty if both have the
    same indices.
    """

    places: tuple[Place, ...]
    renames: Renames
    media: str = ""
    tools: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()

    def path(self, path: FieldPath) -> FieldPath:
        """Convert a path in the chat body to the path in the client's body."""
        match path:
            case ("messages", int(number), *rest) if number < len(self.places):
                return self._in_message(self.places[number], rest)
            case ("tools", int(number), *rest) if number < len(self.tools):
                path = FieldPath("tools", self.tools[number], *rest)
            case ("tool_choice", "allowed_tools", "tools", int(number), *rest) if number < len(self.allowed):
                path = FieldPath("tool_choice", "allowed_tools", "tools", self.allowed[number], *rest)
        for prefix, target in self.renames:
            if (indices := _fit(path, prefix)) is not None:
                left = iter(indices)
                head = (next(left) if key is INDEX else key for key in target)
                return FieldPath(*head, *path[len(prefix) :])
        return path

    def _in_message(self, place: Place, rest: list[str | int]) -> FieldPath:
        match rest:
            case ["content", int(part), *below]:
                if self.media and below and below[0] in ("image_url", "video_url"):
                    below[0] = self.media
                return FieldPath(*place.part(part), *below)
        return FieldPath(*place.message, *rest)


def _fit(path: FieldPath, prefix: Prefix) -> list[int] | None:
    """Return the indices that match INDEX in `prefix` if the path begins with `prefix`, otherwise None."""
    indices = []
    if len(path) < len(prefix):
        return None
    for key, wanted in zip(path, prefix, strict=False):
        if wanted is INDEX and isinstance(key, int):
            indices.append(key)
        elif key != wanted:
            return None
    return indices
