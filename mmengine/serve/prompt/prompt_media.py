"""Fetches media from the URLs and files in a prompt, so that the processor receives bytes.

`media_options={"urls": …}` permits fetching: True for every public host, a list of host names, or a
MediaFetcher with its own limits. Fetched media are treated like media that were sent as bytes: the log and
the media store record the content, never the URL. The processor refuses references that were not fetched.
"""

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

MAX_FETCHERS = 16  # maximum number of cached fetchers; each list of hosts has a fetcher with its own threads
_lock = threading.Lock()


def names_urls(prompt: Prompt) -> bool:
    """Return whether the prompt's options permit fetching. The prompt's media are not examined."""
    return bool((prompt.media_options or {}).get("urls"))


def fetcher_of(prompt: Prompt) -> MediaFetcher | None:
    """Return the fetcher for a prompt, or None if fetching is not permitted.

    Raises InvalidRequest if `urls` has an invalid value.
    """
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
        return _shared_fetcher(hosts)


@lru_cache(MAX_FETCHERS)
def _shared_fetcher(hosts: tuple[str, ...] | None) -> MediaFetcher:
    return MediaFetcher(FetchLimits(hosts=hosts))


class PromptMedia:
    """A prompt whose media are fetched. The constructor starts the downloads.

    `done` is called when all media have arrived or a download has failed, on a fetcher's thread or in the
    constructor. `is_over` returns whether the request was cancelled. Raises InvalidRequest.
    """

    def __init__(
        self,
        prompt: Prompt,
        done: Callable[["PromptMedia"], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._prompt = prompt
        self._fetching: PromptFetch | None = None
        self._places: dict[str, Place] = {}
        fetcher = fetcher_of(prompt)
        self._reads_files = fetcher is not None and fetcher.reads_files
        if fetcher is not None:
            self._replaced(self._note)
        if fetcher is not None and self._places:
            report = done or (lambda media: None)
            self._fetching = fetcher.begin(list(self._places), lambda _: report(self), is_over)
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
        """Wait for all media, and return the prompt with fetched bytes instead of URLs and paths.

        Raises FetchRefused, AttemptOver.
        """
        prompt, fetching = self._prompt, self._fetching
        if fetching is not None:
            fetching.wait()
            if fetching.error is not None:
                name, error = fetching.error
                raise error.at(*self._places[name]) if isinstance(error, FetchRefused) else error
            found = fetching.found
            prompt = self._replaced(lambda name, where: found[name])
        return prompt

    def __enter__(self) -> "PromptMedia":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the fetched bytes after the processor has read them, or after a cancellation.

        A second call is no error.
        """
        if self._fetching is not None:
            self._fetching.release()
