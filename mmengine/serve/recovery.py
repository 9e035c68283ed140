"""Going on where another process ended: pixels are handed out again, answers that nobody received kept."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmengine.config import EngineConfig
from mmengine.core.outputs import Output
from mmengine.core.past import PastAnswer
from mmengine.errors import InvalidMedia
from mmengine.models.plugin import MediaInput
from mmengine.request import MediaItem
from mmengine.serve.media_store import MediaStore
from mmengine.serve.operators import operator_log

if TYPE_CHECKING:
    from mmengine.build import Built

MEDIA_FOLDER = "media"
_NOT_KEPT = "images and videos were not kept beside the log, and its own are lost with the process that ended"


def open_store(log: str | Path, config: EngineConfig) -> MediaStore | None:
    """The media store beside a log; None where there shall be none."""
    if not config.media_store_bytes:
        return None
    return MediaStore(Path(log) / MEDIA_FOLDER, config.media_store_bytes)


def recover(built: "Built", store: MediaStore | None, cause: str) -> dict[str, PastAnswer]:
    """Let the core go on. A request whose media cannot be had again ends with an error. `cause`: see
    Resume. Gives the answers that were on their way, or not received, by core id."""
    past, loaded = built.past, {}
    lost = []
    for name, known in past.state.requests.items():
        items = known.request.media
        if store is not None:
            store.hold_stored(name, items)
        try:
            media = [_load(item, store, built, loaded) for item in items]
        except InvalidMedia as error:
            media = []
            lost.append((name, str(error)))
        built.executor.attach(name, media)
    if store is not None:
        store.sweep()
    built.core.recover(past.recovered(tuple(lost)), cause)
    running = len(past.state.requests)
    operator_log.info("log continued", steps_lost=len(past.steps), requests=running, media_lost=len(lost))
    return past.answers


def _load(
    item: MediaItem, store: MediaStore | None, built: "Built", loaded: dict[bytes, MediaInput]
) -> MediaInput:
    if store is None:
        raise InvalidMedia(_NOT_KEPT)
    if item.mm_hash not in loaded:
        loaded[item.mm_hash] = store.load(item, built.processor)
    return replace(loaded[item.mm_hash], item=item)  # equal pixels may stand elsewhere in a prompt


def add_news(answer: PastAnswer, output: Output) -> None:
    """What a step gave a request that nobody took up yet."""
    answer.token_ids.extend(output.token_ids)
    if output.logprobs is not None:
        answer.logprobs = [*(answer.logprobs or ()), *output.logprobs]
    if output.finish_reason is not None:
        answer.reason, answer.detail = output.finish_reason, output.detail
        answer.num_cached_tokens = output.num_cached_tokens


def was_given_up(answer: PastAnswer) -> bool:
    """Whether the request was cancelled, so that its answer is none. A deadline that passed is one."""
    return answer.reason == "abort" and answer.detail != "deadline"
