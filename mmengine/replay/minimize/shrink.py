"""Makes smaller versions of a script (the inputs of a replay): fewer requests, shorter prompts and answers,
smaller media, or default values.

Each function returns a new script and leaves the old script unchanged. The caller decides whether the new
script still fails.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from mmengine.events import vocabulary as ev
from mmengine.replay.rerun.script import Answer, Observation, Script
from mmengine.request import MediaItem, SamplingParams

T = TypeVar("T")
# Settings that are reduced as long as the script still fails.
SIZES = (
    *("num_blocks", "max_num_seqs", "token_budget", "max_model_len", "encoder_cache_size"),
    *("encoder_budget", "swap_blocks", "num_draft_tokens", "lookahead_tokens", "num_state_slots"),
    "max_loras",
)


def fewest(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Return a subset of `items`, in order, that still fails and from which no single item can be removed.

    The algorithm is delta debugging, which removes large groups first.
    """
    kept, size = list(items), len(items)
    while kept and size:
        place, fewer = 0, False
        while place < len(kept):
            rest = kept[:place] + kept[place + size :]
            if fails(rest):
                kept, fewer = rest, True
            else:
                place += size
        if size == 1 and not fewer:
            break
        size = max(1, min(size, len(kept)) // 2)
    return kept


def smallest(low: int, high: int, fails: Callable[[int], bool]) -> int:
    """Find a failing value in [low, high] by bisection. `high` must fail. The result is the smallest failing
    value if all greater values fail too.
    """
    if low >= high or fails(low):
        return min(low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high


def digest(script: Script) -> bytes:
    """Return a digest of the script. Scripts with equal replays have equal digests."""
    asked = [(each.step, each.landed, type(each.event).__name__, each.event) for each in script.observations]
    kept = [script.answers[event.request_id] for event in script.requests]
    answers = [(each.tokens.tobytes(), each.stop, each.error, each.runs.tobytes()) for each in kept]
    whole = (script.config, script.failed_steps, asked, answers)
    return hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16).digest()


def keep_requests(script: Script, names: Iterable[str]) -> Script:
    """Return the script with only the named requests. Events without a request stay."""
    kept = {*names, ""}
    return replace(script, observations=[each for each in script.observations if _name(each.event) in kept])


def keep_until(script: Script, step: int) -> Script:
    """Return the script with only the observations up to a step."""
    return replace(
        script,
        observations=[each for each in script.observations if each.step <= step],
        failed_steps={at: error for at, error in script.failed_steps.items() if at <= step},
    )


def before_recoveries(script: Script) -> list[Script]:
    """Return a script for each crash in the log, with only the observations before the recovery."""
    ends = [n for n, each in enumerate(script.observations) if isinstance(each.event, ev.Recovered)]
    return [replace(script, observations=script.observations[:end]) for end in ends]


def keep_events(script: Script, happened: Sequence[Observation]) -> Script:
    """Return the script with all arrivals and the observations in `happened`. All other observations are
    removed.
    """
    kept = set(map(id, happened))
    return replace(
        script,
        observations=[o for o in script.observations if isinstance(o.event, ev.Queued) or id(o) in kept],
    )


def move_arrival(script: Script, name: str, step: int) -> Script:
    """Move a request's arrival to another step, and the request's other events by the same number of
    steps.
    """
    first = next(each.step for each in script.observations if _name(each.event) == name)
    moved = [
        _shifted(each, step - first) if _name(each.event) == name else each for each in script.observations
    ]
    return replace(script, observations=sorted(moved, key=lambda each: each.step))


def _shifted(observation: Observation, steps: int) -> Observation:
    at = (max(0, observation.step + steps), max(0, observation.landed + steps))
    return replace(observation, step=at[0], landed=at[1])


def shorten_answer(script: Script, name: str, count: int) -> Script:
    """Cut a request's answer after `count` tokens, and set `max_tokens` to `count`."""
    asked = _queued(script, name)
    limits = {"max_tokens": count, "min_tokens": 0}
    answers = {**script.answers, name: Answer(script.answers[name].tokens[:count])}
    outputs = asked.outputs if len(asked.outputs) < 4 * count else b""
    sampling = msgspec.structs.replace(asked.sampling, **limits)
    return replace(_changed(script, name, sampling=sampling, outputs=outputs), answers=answers)


def shorten_stop(script: Script, name: str, count: int) -> Script:
    """Return the script with an answer that stops after `count` tokens. The stop reason stays the same."""
    answer = script.answers[name]
    sooner = replace(answer, tokens=answer.tokens[:count], runs=answer.runs[answer.runs[:, 0] < count])
    return replace(script, answers={**script.answers, name: sooner})


def drop_media(script: Script, name: str, index: int) -> Script:
    """Remove a media item. Its placeholder tokens stay in the prompt as text tokens."""
    media = list(_queued(script, name).media)
    del media[index]
    return _changed(script, name, media=tuple(media))


def resize_media(script: Script, mm_hash: bytes, size: int) -> Script:
    """Reduce a media item to one run of `size` embeddings, in all requests with this item."""
    for event in script.requests:
        for index, item in enumerate(event.media):
            if item.mm_hash != mm_hash:
                continue
            start, length = item.runs[0]
            for first, more in reversed(item.runs[1:]):
                event = _without_tokens(event, first, more)
            event = _without_tokens(event, start + size, length - size)
            media = list(event.media)
            media[index] = MediaItem(mm_hash, item.modality, ((start, size),), (1, 2, 2))
            event = msgspec.structs.replace(event, media=tuple(media))
            script = _with(script, event)
    return script


def text_ranges(event: ev.Queued) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each range of text tokens in a prompt, last range first."""
    places = [(start, start + length) for item in event.media for start, length in item.runs]
    ends = [0, *(end for _, end in places)]
    starts = [*(start for start, _ in places), len(event.prompt) // 4]
    for start, end in reversed(list(zip(ends, starts, strict=True))):
        if start < end:
            yield start, end


def drop_text(script: Script, name: str, start: int, count: int) -> Script:
    """Return the script without `count` text tokens in a prompt, from `start` on."""
    return _with(script, _without_tokens(_queued(script, name), start, count))


def merge_requests(script: Script, name: str, into: str, more: int = 0) -> Script:
    """Remove the request `name`, and lengthen the prompt of the request `into` by the removed prompt's length
    plus `more` tokens.
    """
    gone = _queued(script, name)
    longer = _lengthened(_queued(script, into), len(gone.prompt) // 4 + more)
    rest = [event.request_id for event in script.requests if event.request_id != name]
    return keep_requests(_with(script, longer), rest)


def fill_pool(script: Script, names: Sequence[str], more: int) -> Script:
    """Keep only the requests `names`, and lengthen their prompts, so that the requests fill the KV pool.

    The first prompt grows by `more` tokens beyond an equal share of the missing tokens. The other prompts
    share the rest.
    """
    config, script = script.config, keep_requests(script, names)
    missing = (config.num_blocks - 1) * config.block_size - sum(len(e.prompt) // 4 for e in script.requests)
    for number, event in enumerate(script.requests):
        count = missing // (len(names) - number) + (more if number == 0 else 0)
        room = config.max_model_len - len(event.prompt) // 4 - event.sampling.max_tokens
        count = max(0, min(count, room))
        script, missing = _with(script, _lengthened(event, count)), missing - count
    return script


def move_answers_to_prompts(script: Script, count: int) -> Script:
    """Move `count` tokens from each answer to the prompt. Each answer keeps at least a single token."""
    for event in [event for event in script.requests if event.sampling.max_tokens]:
        name, asked = event.request_id, event.sampling.max_tokens
        moved = min(count, asked - 1)
        script = shorten_answer(_with(script, _lengthened(event, moved)), name, asked - moved)
    return script


def _lengthened(event: ev.Queued, count: int) -> ev.Queued:
    last = int(np.frombuffer(event.prompt, np.int32)[-1])
    more = np.arange(last + 1, last + 1 + count, dtype=np.int32).tobytes()
    return msgspec.structs.replace(event, prompt=event.prompt + more)


def plain_tokens(script: Script, names: Iterable[str]) -> Script:
    """Replace the prompt tokens and the answer tokens of the named requests by consecutive numbers. Each
    prompt has a different first number, so no requests share a prefix.
    """
    numbers = {event.request_id: number for number, event in enumerate(script.requests)}
    for name in names:
        count = len(_queued(script, name).prompt) // 4
        first = 10_000 * (1 + numbers[name])
        prompt = np.arange(first, first + count, dtype=np.int32).tobytes()
        script = _changed(script, name, prompt=prompt)
        answer = script.answers[name]
        plain = replace(answer, tokens=np.arange(len(answer.tokens), dtype=np.int32) % 997)
        script = replace(script, answers={**script.answers, name: plain})
    return script


def plain_fields(event: ev.Queued) -> Iterator[dict[str, Any]]:
    """Yield dicts that reset fields to their default values. The first dict resets all fields, and each
    further dict a single field.
    """
    sampling = SamplingParams(max_tokens=event.sampling.max_tokens, seed=0)
    sampling = sampling if sampling.max_tokens else event.sampling
    defaults = {
        "sampling": sampling,
        "sample_index": 0,
        "priority": 0,
        "cache_salt": "",
        "deadline_ns": 0,
        "group": "",
        "grammar": None,
        "envelope": b"",
        "thinking": None,
        "outputs": b"",
        "adapter": None,
        "tenant": "",
    }
    differ = {name: value for name, value in defaults.items() if getattr(event, name) != value}
    if differ:
        yield differ
    if len(differ) > 1:
        for name, value in differ.items():
            yield {name: value}


def set_fields(script: Script, name: str, fields: dict[str, Any]) -> Script:
    changed = _changed(script, name, **fields)
    if "grammar" not in fields:
        return changed
    kinds = (ev.GrammarReady, ev.GrammarFailed)
    kept = [o for o in changed.observations if not (isinstance(o.event, kinds) and _name(o.event) == name)]
    return replace(changed, observations=kept)


def _without_tokens(event: ev.Queued, start: int, count: int) -> ev.Queued:
    """Return the request without `count` prompt tokens from `start` on. The positions of later media
    decrease.
    """
    media = tuple(
        msgspec.structs.replace(
            item, runs=tuple((at - count if at > start else at, size) for at, size in item.runs)
        )
        for item in event.media
    )
    prompt = event.prompt[: 4 * start] + event.prompt[4 * (start + count) :]
    return msgspec.structs.replace(event, prompt=prompt, media=media)


def _name(event: ev.Event) -> str:
    return getattr(event, "request_id", "")


def _queued(script: Script, name: str) -> ev.Queued:
    return next(event for event in script.requests if event.request_id == name)


def _changed(script: Script, name: str, **fields: Any) -> Script:
    return _with(script, msgspec.structs.replace(_queued(script, name), **fields))


def _with(script: Script, event: ev.Queued) -> Script:
    """Return the script in which `event` replaces the arrival with the same request id."""
    return replace(
        script,
        observations=[
            replace(each, event=event)
            if isinstance(each.event, ev.Queued) and each.event.request_id == event.request_id
            else each
            for each in script.observations
        ],
    )
