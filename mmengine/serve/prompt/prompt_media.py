"""URLs and files that a prompt names, in place of which the processor gets bytes.

`media_options={"urls": …}` opens the door: True for every public host, names of hosts, or a MediaFetcher with
limits of its own. What was fetched is an image or a video like one that was sent as bytes: the log and the
media store know of its content, and never of a URL. What is not fetched here, the processor refuses."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from mmengine.errors import FIELD, ConfigError, InvalidRequest
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.processing.fetch.limits import FetchLimits, hosts_of
from mmengine.processing.fetch.prompt_fetch import PromptFetch
from mmengine.processing.fetch.refusals import FetchRefused
from mmengine.serve.prompt.media_references import Place, Replace, replaced, replaced_items
from mmengine.serve.prompt.prompt import Prompt

MAX_DOORS = 16  # of callers that name hosts: each has threads of its own
_lock = threading.Lock()


def names_urls(prompt: Prompt) -> bool:
    """Whether its media may be fetched: a glance."""
    return bool((prompt.media_options or {}).get("urls"))


def door_of(prompt: Prompt) -> MediaFetcher | None:
    """Raises InvalidRequest for a value that opens none."""
    given = (prompt.media_options or {}).get("urls")
    if isinstance(given, MediaFetcher):
        return given
    if given is None or given is False:
        return None
    try:
        hosts = hosts_of(given)
    except ConfigError as error:
        raise InvalidRequest(f"{FIELD}: {error.text}", path=("media_options", "urls")) from None
    with _lock:
        return _shared_door(hosts)


@lru_cache(MAX_DOORS)
def _shared_door(hosts: tuple[str, ...] | None) -> MediaFetcher:
    return MediaFetcher(FetchLimits(hosts=hosts))


class PromptMedia:
    """A prompt whose media are fetched, from when it is made. `done`: called on a thread of the door, or at
    once, when `prompt` does not wait any more. `is_over`: whether nobody wants it. Raises InvalidRequest."""

    def __init__(
        self,
        prompt: Prompt,
        done: Callable[["PromptMedia"], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._prompt = prompt
        self._fetching: PromptFetch | None = None
        self._places: dict[str, Place] = {}
        door = door_of(prompt)
        self._reads_files = door is not None and door.reads_files
        if door is not None:
            self._replaced(self._note)
        if door is not None and self._places:
            tell = done or (lambda media: None)
            self._fetching = door.begin(list(self._places), lambda _: tell(self), is_over)
        elif done is not None:
            done(self)

    def _note(self, name: str, where: Place) -> str:
        self._places.setdefault(name, where)
        return name

    def _replaced(self, replace_name: Replace) -> Prompt:
        given, files = self._prompt, self._reads_files
        messages = given.messages
        if isinstance(messages, (list, tuple)):
            messages = replaced(messages, replace_name, files)
        return replace(
            given,
            messages=messages,
            images=replaced_items(given.images, "image", replace_name, files),
            videos=replaced_items(given.videos, "video", replace_name, files),
        )

    def prompt(self) -> Prompt:
        """With bytes in place of names; waits for them. Raises FetchRefused, AttemptOver."""
        options = self._prompt.media_options
        if options is None or "urls" not in options:
            return self._prompt
        prompt, fetching = self._prompt, self._fetching
        if fetching is not None:
            fetching.wait()
            if fetching.error is not None:
                name, error = fetching.error
                raise error.at(*self._places[name]) if isinstance(error, FetchRefused) else error
            found = fetching.found
            prompt = self._replaced(lambda name, where: found[name])
        return replace(prompt, media_options={key: value for key, value in options.items() if key != "urls"})

    def __enter__(self) -> "PromptMedia":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """The processor has read it, or nobody wants it. Twice is no error."""
        if self._fetching is not None:
            self._fetching.release()
