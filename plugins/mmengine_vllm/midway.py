"""Makes the first events of a log that begins while requests run.

A replay that applies these events reaches the current state of vLLM's scheduler.

Up to two artificial steps replace the earlier history. The first step recomputes the last computed token of
each running request that is in no step in flight. The second step is the step in flight. The contents of free
KV blocks are unknown.
"""

import numpy as np
from msgspec.structs import replace

from mmengine.events import vocabulary as ev
from mmengine_vllm.bases import Numbered
from mmengine_vllm.columns import int32_bytes, int64_bytes
from mmengine_vllm.entries import NO_ROW, Tracked
from mmengine_vllm.kv_groups import block_groups_of, split_blocks
from mmengine_vllm.recorder import Recorder
from mmengine_vllm.request_facts import queued_of
from mmengine_vllm.vllm_object import VllmObject


def beginning_of(recorder: Recorder, scheduler: VllmObject) -> tuple[Numbered, int] | None:
    """Return the events that follow STARTED, and the next event's step number.

    Returns None if several steps are in flight, or if the step in flight contains a request that has ended or
    was preempted. The recorder must have written all entries before the call.
    """
    steps = list(recorder.in_flight)
    flying = steps[0].output.num_scheduled_tokens if steps else {}
    if len(steps) > 1 or not flying.keys() <= recorder.requests.keys():
        return None
    if any(recorder.requests[name].row == NO_ROW for name in flying):
        return None
    events: Numbered = []
    waiting = [request.request_id for request in scheduler.waiting if request.request_id in recorder.requests]
    behind = dict.fromkeys(waiting)
    for name in (*(name for name in recorder.requests if name not in behind), *waiting):
        events += [(event, 0) for event in _queued(recorder, recorder.requests[name])]
    maker = _Admissions(recorder, scheduler)
    resting = [request.request_id for request in scheduler.running if request.request_id not in flying]
    step = 0
    if resting:
        computed = {name: recorder.requests[name].request.num_computed_tokens - 1 for name in resting}
        events += [(maker.admitted(name, computed[name], 1), step) for name in resting]
        if recorder.overlaps:
            events.append((ev.Dispatched(), step))
        last = b"".join(_last_id(recorder, recorder.requests[name]) for name in resting)
        events.append((ev.Executed(last), step))
        step += 1
    if steps:
        for name in steps[0].ids:
            before = recorder.requests[name].request.num_computed_tokens - flying[name]
            events.append((maker.admitted(name, before, flying[name]), step))
        if recorder.overlaps:
            events.append((ev.Dispatched(), step))
            step += 1
    return events, step


def _is_decoding(recorder: Recorder, tracked: Tracked) -> bool:
    """Return whether a request has a row, is in no step in flight, and has computed all tokens except the
    last.
    """
    request = tracked.request
    if tracked.row == NO_ROW or any(request.request_id in step.ids for step in recorder.in_flight):
        return False
    return request.num_prompt_tokens <= request.num_computed_tokens == request.num_tokens - 1


def _ids(recorder: Recorder, request: VllmObject) -> np.ndarray:
    """Return all token ids of a request as the log contains them, int32."""
    salt = request.request_id if request.prompt_token_ids is None else request.cache_salt or ""
    return recorder.contents.ids(recorder.contents.begin(int64_bytes(request.all_token_ids), salt)[0])


def _last_id(recorder: Recorder, tracked: Tracked) -> bytes:
    """Return the token id that the first step samples for a row, as bytes; b"" if it samples none."""
    return _ids(recorder, tracked.request)[-1:].tobytes() if _is_decoding(recorder, tracked) else b""


def _queued(recorder: Recorder, tracked: Tracked) -> list[ev.Event]:
    request = tracked.request
    ids, num_prompt = _ids(recorder, request), request.num_prompt_tokens
    known = len(ids) - _is_decoding(recorder, tracked)
    queued = queued_of(request, recorder.contents, hides=recorder.hides)
    queued = replace(queued, prompt=ids[:num_prompt].tobytes(), outputs=ids[num_prompt:known].tobytes())
    if queued.grammar is not None and not tracked.waits_for_grammar:
        return [queued, ev.GrammarReady(request.request_id)]
    return [queued]


class _Admissions:
    """Makes ADMITTED events. Later rows share the blocks and encoder outputs of earlier rows."""

    def __init__(self, recorder: Recorder, scheduler: VllmObject):
        self._recorder, self._blocks_of = recorder, scheduler.kv_cache_manager.get_block_ids
        self._groups = block_groups_of(scheduler) if recorder.groups else ()
        self._size = scheduler.block_size
        self._taken: set[int] = set()
        self._encoded: set[bytes] = set()

    def admitted(self, name: str, computed: int, num_tokens: int) -> ev.Admitted:
        tracked = self._recorder.requests[name]
        cached, new = self._blocks(self._blocks_of(name), computed)
        encode = []
        for index, item in enumerate(tracked.media):
            if item.mm_hash in self._recorder.encoded and item.mm_hash not in self._encoded:
                self._encoded.add(item.mm_hash)
                encode.append((item.mm_hash, tracked.row, index))
        kind = ev.AdmittedWithAdapter if tracked.has_adapter and self._recorder.has_adapters else ev.Admitted
        return kind(
            name,
            tracked.row,
            num_tokens,
            int32_bytes(cached),
            int32_bytes(new),
            encode=tuple(encode),
            num_computed=computed,
        )

    def _blocks(self, of_groups: tuple[list[int], ...], computed: int) -> tuple[list[int], list[int]]:
        """Return a request's blocks as (shared blocks, new blocks). `computed`: number of tokens with KV."""
        if not self._groups:
            blocks = of_groups[self._recorder.group]
            shared = (place for place, block in enumerate(blocks) if block not in self._taken)
            first = next(shared, len(blocks))
            self._taken.update(blocks)
            return blocks[:first], blocks[first:]
        seen = []
        for blocks, group in zip(of_groups, self._groups, strict=True):
            first = max(0, computed - group.window + 1) // self._size if group.window else 0
            seen.append([0] * first + blocks[first:])
        return split_blocks(seen, computed // self._size, self._recorder.groups)
