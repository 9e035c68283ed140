"""Maps error paths back to bodies in the Responses and Messages APIs.

Bodies of these APIs are converted to a chat body, so errors have paths in the chat body. Tables with prefixes
map such a path back to the body that the client sent.
"""

from typing import NamedTuple

from mmengine.errors import FieldPath

INDEX = None  # Matches any index in a prefix. In the replacement, it stands for the matched index.
Prefix = tuple[str | None, ...]
Renames = tuple[tuple[Prefix, Prefix], ...]


class Place(NamedTuple):
    """A chat message's path in the client's body. `parts`: its content parts' paths. A part that `parts`
    lacks has the path content / index below the message.
    """

    message: FieldPath
    parts: tuple[FieldPath, ...] = ()

    def part(self, number: int) -> FieldPath:
        return self.parts[number] if number < len(self.parts) else self.message / "content" / number


class FieldNames(NamedTuple):
    """The client's names for chat fields.

    `places`: an entry for each chat message. `renames`: pairs of a prefix of a chat path and its replacement;
    the first match wins. `media`: the client's name for image_url and video_url, or "" if the names are the
    same. `tools`: each chat tool's index in the client's body; empty if the indices are the same.
    """

    places: tuple[Place, ...]
    renames: Renames
    media: str = ""
    tools: tuple[int, ...] = ()

    def path(self, path: FieldPath) -> FieldPath:
        """Convert a path in the chat body to the path in the client's body."""
        match path:
            case ("messages", int(number), *rest) if number < len(self.places):
                return self._in_message(self.places[number], rest)
            case ("tools", int(number), *rest) if number < len(self.tools):
                path = FieldPath("tools", self.tools[number], *rest)
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
    """Return the indices that match INDEX if the path begins with `prefix`, otherwise None."""
    indices = []
    if len(path) < len(prefix):
        return None
    for key, wanted in zip(path, prefix, strict=False):
        if wanted is INDEX and isinstance(key, int):
            indices.append(key)
        elif key != wanted:
            return None
    return indices
