"""The row invariants: which requests may run, and which KV a row's blocks contain. A row is a running
request's slot in the batch. invariants.py names the invariants.

Each function checks an invariant, and yields a sentence per violation.
"""

from collections.abc import Iterator

import numpy as np

from mmengine.core.state.blocks import block_extras, threshold_of
from mmengine.core.state.columns import RUNS_ON
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.state import State
from mmengine.request import run_start


def _name(state: State, row: int) -> str:
    return repr(state.requests_by_row[row].request.request_id)


def broken_grammars(state: State) -> Iterator[str]:
    """Check that no request has a row before its grammar is compiled."""
    for row in state.running.tolist():
        if state.requests_by_row[row].waits_for_grammar:
            yield f"request {_name(state, row)} has row {row}, but its grammar is not compiled"


def broken_ends(state: State) -> Iterator[str]:
    """Check that a step contains no request that is complete, failed or cancelled."""
    if not state.is_open or state.config.compat:
        return
    for name in (*state.cancelled, *state.grammar_failed):
        yield f"a step was decided, but request {name!r}, which was cancelled or failed before, has not ended"
    rows = state.step_rows
    for row in rows[state.ended[rows] != RUNS_ON].tolist():
        yield f"the step computes row {row} of request {_name(state, row)}, whose text has ended or failed"
    pending = state.num_tokens[rows] + state.num_pending[rows]
    for row in rows[pending >= state.max_total[rows]].tolist():
        if not state.requests_by_row[row].request.is_prefill:
            count = int(state.num_tokens[row] + state.num_pending[row])
            yield (
                f"the step computes row {row} of request {_name(state, row)}, but this request reaches "
                f"its length limit with {count} tokens, including the tokens from steps in flight"
            )


def broken_overlap(state: State) -> Iterator[str]:
    """Check that the step being decided does not depend on the results of steps in flight."""
    rows = state.step_rows
    if not state.flights or not len(rows):
        return
    pending = state.num_pending[rows]
    early = (pending > 0) & (state.num_tokens[rows] + pending >= np.abs(state.runs_ahead_to[rows]))
    for row in rows[early].tolist():
        yield (
            f"the step computes row {row} of request {_name(state, row)}, but whether and how this request "
            "continues depends on a step in flight"
        )
    if state.verifies and state.scheduled_drafts[state.flights[-1].rows].any():
        yield "the step was decided while the step before verifies drafts, but depends on the number accepted"


def broken_chunks(state: State) -> Iterator[str]:
    """Check that each row computes at least one token, and at most long_prefill_token_threshold tokens."""
    rows = state.step_rows
    if not state.is_open or state.config.compat or not len(rows):
        return
    most, counts = threshold_of(state.config, len(state.requests)), state.scheduled[rows]
    for row in rows[counts < 1].tolist():
        count = int(state.scheduled[row])
        yield f"the step has row {row} of request {_name(state, row)}, but computes {count} tokens"
    for row in rows[counts > most].tolist() if most else ():
        yield (
            f"the step computes {state.scheduled[row]} tokens of request {_name(state, row)}; the limit is "
            f"{most} (long_prefill_token_threshold)"
        )


def broken_atomic_runs(state: State) -> Iterator[str]:
    """Check that a row's computed tokens never end inside an embedding run."""
    rows = state.running if state.config.atomic_runs else state.running[:0]
    for row in rows.tolist():
        media, after = state.requests_by_row[row].request.media, int(state.num_computed[row])
        for computed in (after - int(state.scheduled[row]), after) if media else ():
            start = run_start(media, computed)
            if start != computed:
                yield (
                    f"row {row} of request {_name(state, row)} has {computed} computed tokens, which splits "
                    f"the embedding run at token {start}; one step must compute the whole run"
                )


def broken_whole_prompt(state: State) -> Iterator[str]:
    """Check that no row has computed only a part of its prompt."""
    for row in state.running.tolist() if state.config.whole_prompt else ():
        computed, num_prompt = int(state.num_computed[row]), state.requests_by_row[row].num_prompt
        if computed < num_prompt:
            yield (
                f"row {row} of request {_name(state, row)} has computed {computed} of the prompt's "
                f"{num_prompt} tokens; one step must compute the whole prompt"
            )


def broken_writes(state: State) -> Iterator[str]:
    """Check that no row shares the blocks into which its next tokens are written."""
    rows = state.running
    if not len(rows):
        return
    first = state.num_computed[rows] // state.block_size
    columns = np.arange(state.block_table.shape[1])
    written = (columns >= first[:, None]) & (columns < state.num_blocks[rows][:, None])
    blocks = state.block_table[rows]
    if state.num_groups > 1:
        written = np.concatenate([written] * state.num_groups)
        rows = np.concatenate([rows] * state.num_groups)
        blocks = np.concatenate((blocks, *state.windows.tables[:, state.running]))
    places = np.argwhere(written & (state.blocks.references[blocks] != 1))
    for index, number in places[:1].tolist():
        row, block = int(rows[index]), int(blocks[index, number])
        yield (
            f"row {row} of request {_name(state, row)} writes its next tokens into block {block}, which has "
            f"{int(state.blocks.references[block])} references; a block that is written must have one"
        )


def broken_hits(state: State) -> Iterator[str]:
    """Check that each row's cached blocks have the row's own tokens in the prefix index. For a newly admitted
    row, also check the media, the salt and the adapter.
    """
    rows, index = state.running, state.blocks.index
    if not len(rows) or not state.config.enable_prefix_caching:
        return
    numbers = np.arange(int(state.num_filled[rows].max(initial=0)))
    places = np.argwhere(numbers < state.num_filled[rows][:, None])
    owners, numbers = rows[places[:, 0]], places[:, 1]
    blocks = state.block_table[owners, numbers]
    recorded = index.content[blocks] != NO_CONTENT
    owners, numbers, blocks = owners[recorded], numbers[recorded], blocks[recorded]
    other = (index.tokens_of(blocks) != state.block_tokens[owners, numbers]).any(axis=1)
    for place in np.flatnonzero(other)[:1].tolist():
        row, block = int(owners[place]), int(blocks[place])
        yield (
            f"block {block}, number {int(numbers[place])} of request {_name(state, row)}, holds the KV of "
            "other tokens than this request has there"
        )
    for row in rows.tolist():
        req_state = state.requests_by_row[row]
        if not state.is_open or req_state.admitted_step != state.step:
            continue
        own = numbers[owners == row]
        last = int(own.max(initial=-1)) + 1
        ahead, whole_prompt = state.constants.media_ahead, state.config.whole_prompt
        extras = block_extras(req_state.request, 0, last, state.block_size, ahead, whole_prompt)
        for number, block in zip(own.tolist(), blocks[owners == row].tolist(), strict=True):
            if index.extra.get(block, b"") != extras.get(number, b""):
                yield (
                    f"block {block}, number {number} of request {_name(state, row)}, holds the KV of other "
                    "media, of another tenant, or of another adapter"
                )
                break
