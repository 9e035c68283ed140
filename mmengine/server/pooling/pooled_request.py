"""A parsed pooling call. Engine errors are converted to errors that name the input's path in the client's
body.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmengine.errors import FieldPath, MMEngineError
from mmengine.serve.pooling.calls import INPUTS, Jobs
from mmengine.serve.text.request_output import Completion
from mmengine.server.http.errors import ApiError, api_error

CONVERSATION = FieldPath("messages")


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """A parsed call: the jobs for the engine, the function that renders their results, and the names of
    ignored fields. `places`: the path of each job's input in the body.
    """

    jobs: Jobs
    render: Callable[[Sequence[Completion]], bytes]
    places: "Places"
    params: frozenset[str]
    ignored: list[str]

    def api_error(self, error: BaseException, retry_after_s: int = 1) -> ApiError:
        """Convert an engine error to the error that the client receives."""
        return self.places.api_error(error, self.params, retry_after_s)


class Places(NamedTuple):
    """The paths of a call's inputs in the body, in job order. `num_added`: the number of messages that the
    server adds before the client's messages. `limit`: the field that limits the tokens of a text.
    """

    paths: Sequence[FieldPath]
    num_added: int = 0
    limit: str = "truncate_prompt_tokens"

    def api_error(
        self, error: BaseException, params: frozenset[str], retry_after_s: int = 1, index: int = 0
    ) -> ApiError:
        """Convert an error to the error that the client receives. `index`: the index in `paths` if the error
        does not name an input.
        """
        if not isinstance(error, (MMEngineError, ApiError)):
            return api_error(error, params, retry_after_s)
        path: tuple[str | int, ...] = error.path
        if path[:1] == (INPUTS,) and isinstance(error, MMEngineError):
            index, path = (int(path[1]), path[2:]) if path[1:] else (index, path[1:])
            path = path or ("prompt",)
        found = api_error(error, params, retry_after_s)
        match path[:1], path[1:2]:
            case (("messages",), (int(number),)) if self.paths[index] == CONVERSATION:
                return found.at(FieldPath("messages", max(number - self.num_added, 0), *path[2:]))
            case (("messages",), _) | (("prompt",), _):
                return found.at(self.paths[index])
            case (("truncate_prompt_tokens",), _):
                return found.at(FieldPath(self.limit))
        return found


def listed(name: str, given: object) -> list[FieldPath]:
    """Return the path of each input in the field `name`."""
    if isinstance(given, list) and not all(isinstance(each, int) for each in given):
        return [FieldPath(name, index) for index in range(len(given))]
    return [FieldPath(name)]
