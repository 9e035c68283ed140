"""Smaller versions of a script: fewer requests, shorter prompts and answers, smaller media, plain values.

Each function gives a new script and leaves the old one as it is. Whether the new one still fails is
somebody else's question.
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
# Each is tried from the smallest value up that the other settings allow.
SIZES = (
    *("num_blocks", "max_num_seqs", "token_budget", "max_model_len", "encoder_cache_size"),
    *("encoder_budget", "swap_blocks", "num_draft_tokens", "lookahead_tokens", "num_state_slots"),
    "max_loras",
)


def fewest(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A subset, in order, that still fails and from which no single item can be left out: delta
    debugging by complements, large pieces first."""
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
    """A value in [low, high] that fails; `high` is known to. The smallest, where failing is monotone."""
    if low >= high or fails(low):
        return min(low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return high


def digest(script: Script) -> bytes:
    """Equal for scripts that play alike."""
    asked = [(each.step, each.landed, type(each.event).__name__, each.event) for each in script.observations]
    kept = [script.answers[event.request_id] for event in script.requests]
    answers = [(each.tokens.tobytes(), each.stop, each.error, each.runs.tobytes()) for each in kept]
    whole = (script.config, script.failed_steps, asked, answers)
    return hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16).digest()


def only(script: Script, names: Iterable[str]) -> Script:
    """The requests of these names, and what happens to nobody."""
    kept = {*names, ""}
    return replace(script, observations=[each for each in script.observations if _name(each.event) in kept])


def until(script: Script, step: int) -> Script:
    """What was seen up to a step."""
    return replace(
        script,
        observations=[each for each in script.observations if each.step <= step],
        failed_steps={at: error for at, error in script.failed_steps.items() if at <= step},
    )


def with_observations(script: Script, happened: Sequence[Observation]) -> Script:
    """The arrivals, and of what else happened only this."""
    kept = set(map(id, happened))
    return replace(
        script,
        observations=[o for o in script.observations if isinstance(o.event, ev.Queued) or id(o) in kept],
    )


def arriving(script: Script, name: str, step: int) -> Script:
    """A request comes at another step, and what happens to it as much earlier or later."""
    first = next(each.step for each in script.observations if _name(each.event) == name)
    moved = [
        _shifted(each, step - first) if _name(each.event) == name else each for each in script.observations
    ]
    return replace(script, observations=sorted(moved, key=lambda each: each.step))


def _shifted(observation: Observation, steps: int) -> Observation:
    at = (max(0, observation.step + steps), max(0, observation.landed + steps))
    return replace(observation, step=at[0], landed=at[1])


def with_answer(script: Script, name: str, count: int) -> Script:
    """An answer of `count` tokens that ends by length."""
    asked = _queued(script, name)
    limits = {"max_tokens": count, "min_tokens": 0}
    answers = {**script.answers, name: Answer(script.answers[name].tokens[:count])}
    outputs = asked.outputs if len(asked.outputs) < 4 * count else b""
    sampling = msgspec.structs.replace(asked.sampling, **limits)
    return replace(_changed(script, name, sampling=sampling, outputs=outputs), answers=answers)


def with_stop(script: Script, name: str, count: int) -> Script:
    """An answer whose text stops behind `count` tokens, as it did behind more."""
    answer = script.answers[name]
    sooner = replace(answer, tokens=answer.tokens[:count], runs=answer.runs[answer.runs[:, 0] < count])
    return replace(script, answers={**script.answers, name: sooner})


def without_media(script: Script, name: str, index: int) -> Script:
    """An item's place in the prompt becomes text."""
    media = list(_queued(script, name).media)
    del media[index]
    return _changed(script, name, media=tuple(media))


def with_media_size(script: Script, mm_hash: bytes, size: int) -> Script:
    """An item with one run of `size` embeddings, for everyone who has it. Its prompts get shorter."""
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


def texts(event: ev.Queued) -> Iterator[tuple[int, int]]:
    """(start, end) of the stretches of a prompt without embeddings, the last first."""
    places = [(start, start + length) for item in event.media for start, length in item.runs]
    ends = [0, *(end for _, end in places)]
    starts = [*(start for start, _ in places), len(event.prompt) // 4]
    for start, end in reversed(list(zip(ends, starts, strict=True))):
        if start < end:
            yield start, end


def without_text(script: Script, name: str, start: int, count: int) -> Script:
    """A prompt without `count` tokens of text from `start` on."""
    return _with(script, _without_tokens(_queued(script, name), start, count))


def merged(script: Script, name: str, into: str, more: int = 0) -> Script:
    """One request in place of two: `into` gets the length of both, and `more` tokens."""
    gone = _queued(script, name)
    longer = _lengthened(_queued(script, into), len(gone.prompt) // 4 + more)
    rest = [event.request_id for event in script.requests if event.request_id != name]
    return only(_with(script, longer), rest)


def filling(script: Script, names: Sequence[str], more: int) -> Script:
    """Only these requests, with prompts so long that together they hold the whole pool; that of the first
    one is `more` tokens longer, those of the others as much shorter."""
    config, script = script.config, only(script, names)
    missing = (config.num_blocks - 1) * config.block_size - sum(len(e.prompt) // 4 for e in script.requests)
    for number, event in enumerate(script.requests):
        count = missing // (len(names) - number) + (more if number == 0 else 0)
        room = config.max_model_len - len(event.prompt) // 4 - event.sampling.max_tokens
        count = max(0, min(count, room))
        script, missing = _with(script, _lengthened(event, count)), missing - count
    return script


def aged(script: Script, count: int) -> Script:
    """`count` tokens of each answer, as far as it has them, are in the prompt from the start."""
    for event in [event for event in script.requests if event.sampling.max_tokens]:
        name, asked = event.request_id, event.sampling.max_tokens
        moved = min(count, asked - 1)
        script = with_answer(_with(script, _lengthened(event, moved)), name, asked - moved)
    return script


def _lengthened(event: ev.Queued, count: int) -> ev.Queued:
    last = int(np.frombuffer(event.prompt, np.int32)[-1])
    more = np.arange(last + 1, last + 1 + count, dtype=np.int32).tobytes()
    return msgspec.structs.replace(event, prompt=event.prompt + more)


def plain_tokens(script: Script, names: Iterable[str]) -> Script:
    """Prompts that count up, each from another number: nobody shares a beginning with anybody."""
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
    """Fields that could have their default values: all of them, then each alone."""
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
    }
    differ = {name: value for name, value in defaults.items() if getattr(event, name) != value}
    if differ:
        yield differ
    if len(differ) > 1:
        for name, value in differ.items():
            yield {name: value}


def with_fields(script: Script, name: str, fields: dict[str, Any]) -> Script:
    changed = _changed(script, name, **fields)
    if "grammar" not in fields:
        return changed
    kinds = (ev.GrammarReady, ev.GrammarFailed)
    kept = [o for o in changed.observations if not (isinstance(o.event, kinds) and _name(o.event) == name)]
    return replace(changed, observations=kept)


def _without_tokens(event: ev.Queued, start: int, count: int) -> ev.Queued:
    """A prompt without some tokens; media behind them move forward."""
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
    """The script with this arrival in place of the one of its name."""
    return replace(
        script,
        observations=[
            replace(each, event=event)
            if isinstance(each.event, ev.Queued) and each.event.request_id == event.request_id
            else each
            for each in script.observations
        ],
    )
