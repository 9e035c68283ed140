"""Names of fields in the bodies of other APIs.

Bodies of the Responses and Messages APIs are read as chat reads its own. An error then has a path in chat's
body. This module finds the path in the body that the caller sent, from tables of prefixes.
"""

from typing import NamedTuple

from mmengine.errors import FieldPath

INDEX = None  # in a prefix: any index, which the target takes over
Prefix = tuple[str | None, ...]
Renames = tuple[tuple[Prefix, Prefix], ...]


class Place(NamedTuple):
    """Where a message of chat stands in a body. `parts`: where the parts of its content stand; (): in the
    content of the message, one for one."""

    message: FieldPath
    parts: tuple[FieldPath, ...] = ()

    def part(self, number: int) -> FieldPath:
        return self.parts[number] if number < len(self.parts) else self.message / "content" / number


class FieldNames(NamedTuple):
    """The names that a body has for chat's fields. `places`: one for each message. `renames`: prefixes of
    chat's paths and what stands for them, of which the first that fits is used. `media`: the name of the
    field that chat calls image_url or video_url; "" for the same."""

    places: tuple[Place, ...]
    renames: Renames
    media: str = ""

    def path(self, path: FieldPath) -> FieldPath:
        """Return the path in the body for a path in chat's."""
        match path:
            case ("messages", int(number), *rest) if number < len(self.places):
                return self._in_message(self.places[number], rest)
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
    """Return the indices of a path that begins with `prefix`, or None if it begins otherwise."""
    indices = []
    if len(path) < len(prefix):
        return None
    for key, wanted in zip(path, prefix, strict=False):
        if wanted is INDEX and isinstance(key, int):
            indices.append(key)
        elif key != wanted:
            return None
    return indices
