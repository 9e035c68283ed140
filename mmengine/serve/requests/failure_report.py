"""Reports an engine's failure: the traceback, the step, and the step's requests."""

import traceback
from contextlib import suppress
from pathlib import Path

from mmengine.core.state.state import State
from mmengine.errors import MMEngineError

FAILURE_FILE = "failure.txt"  # the last failure's report, in the log's folder
MAX_ROWS = 256  # maximum number of rows that a report lists


def report_failure(error: Exception, state: State, log: Path | None) -> None:
    """Add a description of the current step to an unexpected error, and write the traceback to FAILURE_FILE
    in `log`.
    """
    if isinstance(error, MMEngineError) and error.__cause__ is None:
        return
    error.add_note(describe_step(state))
    if log is not None:
        with suppress(OSError):  # stderr has the report too
            (log / FAILURE_FILE).write_text("".join(traceback.format_exception(error)))


def describe_step(state: State) -> str:
    """Return a text with the current step's number and each row's request id and token counts."""
    lines = [f"The engine was at step {state.step} with {len(state.running)} rows:"]
    for row in state.running[:MAX_ROWS].tolist():
        found = state.requests_by_row[row]
        name = "no request" if found is None else found.request.request_id
        known, computed = int(state.num_tokens[row]), int(state.num_computed[row])
        lines.append(f"  row {row}: {name}, {known} tokens, {computed} computed")
    if len(state.running) > MAX_ROWS:
        lines.append(f"  and {len(state.running) - MAX_ROWS} more")
    return "\n".join(lines)
