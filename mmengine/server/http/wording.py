"""Other APIs are asked in the words of chat. What is wrong with a call is told in those of its own body."""

import re
from typing import NamedTuple

from mmengine.server.http.errors import ApiError

_MESSAGE = re.compile(r"\bmessages\[(\d+)\](?:\.content\[(\d+)\])?")
_MEDIUM = re.compile(r"\bmessage (\d+)(?:, part (\d+))?")
Words = tuple[tuple[re.Pattern[str], str], ...]


class Place(NamedTuple):
    """Of a message that was made of a body: where it stands there. `parts`: where those of its content do;
    (): in the content of what stands there, one for one."""

    message: str
    parts: tuple[str, ...] = ()

    def part(self, number: int) -> str:
        return self.parts[number] if number < len(self.parts) else f"{self.message}.content[{number}]"


class Wording(NamedTuple):
    """`places`: one for each message. `words`: what stands for chat's, in the order in which they are
    replaced."""

    places: tuple[Place, ...]
    words: Words

    def error(self, error: ApiError) -> ApiError:
        param = error.body.param
        return ApiError(
            error.status,
            self.text(error.body.message),
            None if param is None else self.text(param),
            error.body.code,
            error.headers,
        )

    def text(self, text: str) -> str:
        text = _MEDIUM.sub(self._place, _MESSAGE.sub(self._place, text))
        for pattern, word in self.words:
            text = pattern.sub(word, text)
        return text

    def _place(self, found: re.Match[str]) -> str:
        number = int(found[1])
        if number >= len(self.places):
            return found[0]
        place = self.places[number]
        return place.message if found[2] is None else place.part(int(found[2]))
