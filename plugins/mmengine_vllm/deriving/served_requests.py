# mypy: allow-untyped-defs, allow-untyped-calls
"""Serves requests on a vLLM scheduler without a model, and looks for a fault in each call of `schedule`.

Must not import mmengine, because `mmengine log minimize --with` writes pytest files with a copy of this
module.
"""

from collections import deque

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from mmengine_vllm.deriving.scheduler_alone import (
    block_hasher,
    could_run,
    make_request,
    make_scheduler,
    runner_output,
    sampling_requests,
)


class Host:
    """A scheduler and its requests. `requests`: request id -> arguments of make_request."""

    def __init__(self, scheduler, requests):
        self.scheduler, self._requests = scheduler, requests
        self._hasher, self._number = block_hasher(scheduler), 0

    def happen(self, what, argument):
        """Apply an event: add or abort a request, mark a grammar as compiled, or reset the prefix cache."""
        if what == "add":
            self._number += 1
            more = {"hasher": self._hasher, "arrival_time": self._number, **self._requests[argument]}
            self.scheduler.add_request(make_request(argument, **more))
        elif what == "abort":
            self.scheduler.finish_requests([argument], RequestStatus.FINISHED_ABORTED)
        elif what == "grammar" and argument in self.scheduler.requests:
            self.scheduler.requests[argument].structured_output_request.grammar = True
        elif what == "reset":
            self.scheduler.reset_prefix_cache(reset_running_requests=argument)

    def schedule(self):
        return self.scheduler.schedule()

    def update(self, output, tokens, stops, errors):
        """Pass a step's tokens to the scheduler.

        `stops`: request -> the token that ends the request. `errors`: requests whose tokens break their
        grammar.
        """
        for name, last in stops.items():
            self.scheduler.requests[name].sampling_params.stop_token_ids = last
        self.scheduler.structured_output_manager.refused = errors
        self.scheduler.update_from_output(output, runner_output(output, tokens))

    def give_drafts(self, names, drafts):
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


class Answers:
    """The model's answers. `answers`: request id -> (tokens, end, runs).

    `end`: "stop" or "error" if the last token ends the answer, else "". `runs`: {index of a step's first
    token: (number of the step's tokens, number of its drafts)}.
    """

    def __init__(self, answers, num_drafts):
        self._answers, self._num_drafts = answers, num_drafts

    def tokens(self, request, num_drafts):
        """Return the tokens of a step with `num_drafts` drafts, and the answer's end or ""."""
        answer, end, runs = self._answers[request.request_id]
        place = request.num_output_tokens
        count = min(runs.get(place, (1, 0))[0], 1 + num_drafts)
        if end and place + count >= len(answer):
            count = max(1, len(answer) - place)
            return [*answer[place:], *[1] * count][:count], end
        made_up = [each % 997 for each in range(place, place + count)]
        known = answer[place : place + count]
        return known + made_up[len(known) :], ""

    def num_drafts(self, request):
        """Return the number of drafts for the request's next step."""
        runs = self._answers[request.request_id][2]
        offered = runs.get(request.num_output_tokens, (1, self._num_drafts))[1]
        return min(offered, self._num_drafts)


def serve(host, events, answers, *, overlaps, most_calls):
    """Serve requests. Yield (output, whether no step is in flight) after each call of `schedule`.

    `events`: (step, *arguments of `happen`), in order. `overlaps`: whether scheduling is asynchronous.
    """
    left, step = deque(events), 0
    flying: deque = deque()
    for _ in range(most_calls):
        while left and left[0][0] <= step:
            host.happen(*left.popleft()[1:])
        output = host.schedule()
        has_tokens = output.total_num_scheduled_tokens > 0
        yield output, not flying
        if not has_tokens and not flying and not output.preempted_req_ids:
            if not left:
                return
            step = left[0][0]
        step += has_tokens
        flying.append((output, sampling_requests(host.scheduler, output)))
        while len(flying) > (overlaps and has_tokens):
            output, names = flying.popleft()
            _update(host, output, names, answers, overlaps)


def _update(host, output, names, answers, overlaps):
    live, tokens, stops, errors = host.scheduler.requests, {}, {}, set()
    for name in names:
        if name in live:
            num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            tokens[name], end = answers.tokens(live[name], num_drafts)
            if end == "stop":
                stops[name] = tokens[name][-1:]
            elif end:
                errors.add(name)
        else:  # aborted while the step ran; the workers still return a token
            tokens[name] = [0]
    host.update(output, tokens, stops, errors)
    drafting = [name for name in names if name in live]
    if host.scheduler.num_spec_tokens and not overlaps and drafting:
        host.give_drafts(drafting, [[1] * answers.num_drafts(live[name]) for name in drafting])


# Checks of a call


def stalled(scheduler, output, is_idle):
    """Return a description if a call schedules nothing although requests could run, else None. Steps in
    flight (`is_idle` is False) and a full KV pool are valid reasons to schedule nothing.
    """
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    decides = output.total_num_scheduled_tokens or output.preempted_req_ids
    if decides or not is_idle or not free or not could_run(scheduler):
        return None
    running = len(scheduler.running)
    waiting = len(scheduler.requests) - running
    return f"nothing is scheduled: {running} requests run, {waiting} wait, and {free} KV blocks are free"


def over_budget(scheduler, output, limit):
    """Return a description if a call exceeds max_num_scheduled_tokens, else None."""
    total = sum(output.num_scheduled_tokens.values())
    return f"{total} tokens are scheduled, but max_num_scheduled_tokens is {limit}" if total > limit else None


class BlockTables:
    """The requests' block tables, for a scheduler with one KV group."""

    def __init__(self, block_size):
        self._block_size, self._tables = block_size, {}

    def taken_twice(self, output):
        """Update the tables with a call's output. Return a description if the call allocates a block that
        another request holds, else None.
        """
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._tables.pop(name, None)
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        given = [(each.req_id, each.num_computed_tokens, each.block_ids) for each in new]
        given += zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for name, num_computed, blocks in given:
            table, blocks = self._tables.setdefault(name, []), list(blocks[0]) if blocks else []
            hits = 0 if table else num_computed // self._block_size
            for block in blocks[hits:]:
                owners = [other for other, theirs in self._tables.items() if block in theirs]
                if owners:
                    return f"KV block {block} is given to {name} as a new block, but {owners[0]} has it"
            table += blocks
        return None


def decisions(output, groups, block_size):
    """Return a call's decisions as plain values. Running requests come before admitted requests.

    "rows": (request, number of tokens). "computed": cached tokens of admitted requests. "tables": block ids
    of admitted requests. "blocks": new block ids of running requests.

    `groups`: the KV groups to return, in the order of the log. "tables" has the prefix hits first, group by
    group. Other blocks are ordered as in `by_number`.
    """
    cached, drafts = output.scheduled_cached_reqs, output.scheduled_spec_decode_tokens
    known = {each.req_id: (each.num_computed_tokens, each.block_ids) for each in output.scheduled_new_reqs}
    blocks = []
    for place, name in enumerate(cached.req_ids):
        if name in cached.resumed_req_ids:
            known[name] = cached.num_computed_tokens[place], cached.new_block_ids[place]
        elif cached.new_block_ids[place] is not None:
            blocks += by_number(cached.new_block_ids[place], groups)
    names = list(output.num_scheduled_tokens)
    admitted = [name for name in names if name in known]
    encoded = output.scheduled_encoder_inputs
    return {
        "preempted": sorted(output.preempted_req_ids or ()),
        "admitted": admitted,
        "rows": list(output.num_scheduled_tokens.items()),
        "computed": {name: known[name][0] for name in admitted},
        "drafts": {name: len(drafts[name]) for name in names if name not in known and drafts.get(name)},
        "encoded": [(name, index) for name in names for index in encoded.get(name, ())],
        "tables": {name: table_of(*known[name], groups, block_size) for name in admitted},
        "blocks": blocks,
        "evicted": sorted(output.free_encoder_mm_hashes),
    }


def by_number(blocks, groups):
    """Return a request's new blocks: the first block from each group, then the second block from each group,
    and so on.
    """
    return [block for number in zip(*(blocks[group] for group in groups), strict=True) for block in number]


def table_of(computed, blocks, groups, block_size):
    """Return the block ids of an admitted request whose first `computed` tokens are prefix hits."""
    hits = computed // block_size
    cached = [block for group in groups for block in blocks[group][:hits] if block]
    return cached + by_number([of_group[hits:] for of_group in blocks], groups)


def fault_of(cls, settings, requests, events, answers, check):
    """Serve requests on a scheduler class. Return a description of the first fault, or None.

    `check`: ("stalled",), ("budgets",), ("blocks",), ("crash",), or ("decision", call, field, value). `value`
    is the correct value for `field` in the decisions of the call with index `call`.
    """
    kind, *expected = check
    scheduler = make_scheduler(cls, settings)
    tables, limit = BlockTables(settings["block_size"]), settings["max_num_scheduled_tokens"]
    calls = serve(
        Host(scheduler, requests),
        events,
        Answers(answers, settings.get("num_draft_tokens", 0)),
        overlaps=settings["async_scheduling"],
        most_calls=expected[0] + 1 if expected else 100_000,
    )
    try:
        for number, (output, is_idle) in enumerate(calls):
            text = None
            if kind == "stalled":
                text = stalled(scheduler, output, is_idle)
            elif kind == "budgets":
                text = over_budget(scheduler, output, limit)
            elif kind == "blocks":
                text = tables.taken_twice(output)
            elif kind == "decision" and number == expected[0]:
                groups = settings.get("recorded_groups", (0,))
                found = decisions(output, groups, settings["block_size"])[expected[1]]
                text = None if found == expected[2] else f"{expected[1]} is {found}, not {expected[2]}"
            if text is not None:
                return f"call {number}: {text}"
    except Exception as error:
        if kind != "crash":
            raise
        return f"{type(error).__name__}: {error}"
    return None
