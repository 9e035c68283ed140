"""Describes a divergence between a log and a replay as text: both decisions, the likely rule, and the
commands to run next.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mmengine.events import vocabulary as ev
from mmengine.replay.hosted.verify import PROGRESS
from mmengine.replay.tape import CRASH, INVARIANT
from mmengine.replay.verify_report import Divergence

Decode = Callable[[Sequence[int]], str]
MAX_SHOWN = 12  # Maximum number of requests, tokens or blocks in a list.
NOTHING = "nothing"
_STEP = ("Scheduled", "Admitted", "AdmittedWithState", "AdmittedWithAdapter", "Preempted", "LeaseTaken")
_ADMITTED = ("Admitted", "AdmittedWithState", "AdmittedWithAdapter")

# Maps an event and one of its fields to the rule that decides the field.
_RULES = {
    ("Preempted", "mode"): "whether a preempted request's KV is swapped out or dropped",
    ("Preempted", "host_blocks"): "which host blocks take a preempted request's KV",
    ("Preempted", "for_row"): "for which row a request is preempted",
    ("Scheduled", "rows"): "which running requests get tokens",
    ("Scheduled", "num_tokens"): "how many tokens a request computes (token budget, chunks, drafts)",
    ("Scheduled", "num_drafts"): "how many drafts are verified",
    ("Scheduled", "drafters"): "which drafter's drafts are verified",
    ("Admitted", "request_id"): "the order of the waiting queue",
    ("Admitted", "row"): "which free row is taken",
    ("Admitted", "num_tokens"): "how many tokens a new request computes (token budget, chunks)",
    ("Admitted", "cached_blocks"): "prefix cache hits",
    ("Admitted", "num_computed"): "how much of the prompt is computed already",
    ("Admitted", "copy"): "which block of a shared prompt is copied",
    ("Admitted", "swap_in"): "whether KV is swapped in",
    ("Admitted", "state_slot"): "which state slot is taken",
    ("Admitted", "state_from"): "from which kept state a request continues",
    ("Admitted", "num_shared"): "prefix cache hits",
    ("Admitted", "adapters_out"): "which adapters are unloaded",
    ("Finished", "request_id"): "which request ends",
    ("Encoded", "until"): "how much encoder work a step does",
    ("LeaseTaken", "session_id"): "from which session leased blocks are taken",
    ("LeaseTaken", "num_kept"): "how many leased blocks are taken",
    ("Leased", "blocks"): "which blocks a session keeps",
}
_ANYWHERE = {
    "new_blocks": "which free blocks are taken",
    "encode": "which items are encoded (encoder budget, encoder cache)",
    "evict": "which encoder outputs are evicted",
    "mono_ns": "that the log's clock never goes back",
    "step": "to which step an event belongs",
}
_KINDS = {
    "Preempted": "which running request is preempted",
    "Finished": "how a request ends",
    "Encoded": "which item is encoded in parts",
    "StatesKept": "which recurrent states are kept",
    "Leased": "which blocks a session keeps",
    "Fetched": "which blocks are fetched from a store",
    "Stalled": "when a stall is reported",
    "Checkpoint": "how an event changes the state: the decisions before agree, but the states differ",
}


def likely_rule(found: Divergence) -> str:
    """Return a clause with the rule that probably differs, or with the rule that the log breaks."""
    if found.rule:
        return found.rule
    if found.broken is not None:
        return f"{found.broken.rule}: {found.broken.text}"
    if found.field.startswith(INVARIANT):
        return f"{found.field.removeprefix(INVARIANT)}: {found.derived}"
    if found.field == CRASH:
        return "none: this build raises an exception after the log's last record"
    if found.field == "event":
        return _rule_of_kinds(str(found.logged), str(found.derived))
    kind = "Admitted" if found.event in _ADMITTED else found.event
    if (kind, found.field) in _RULES:
        return _RULES[kind, found.field]
    return _ANYWHERE.get(found.field) or _KINDS.get(kind, f"the field {found.field} of {kind}")


def _rule_of_kinds(logged: str, derived: str) -> str:
    """Return the rule that differs if the log and this build have different kinds of events. `derived` may be
    an error's text.
    """
    both = {logged, derived}
    if "Finished" in both:
        return "when a request ends"
    if both <= {"Scheduled", "Preempted", "LeaseTaken"}:
        return "whether enough blocks are free for the running requests"
    if both & {*_ADMITTED}:
        if both & {"Preempted", "LeaseTaken"}:
            return "whether enough blocks are free"
        if "Fetched" in both:
            return "whether a prefix is fetched from a store"
        return "whether a waiting request may start (budgets, rows, blocks, grammar, adapter)"
    for kind in ("Preempted", "LeaseTaken", "Encoded", "StatesKept", "Evicted", "Leased", "Stalled"):
        if kind in both:
            return {
                "Preempted": "whether a request must be preempted",
                "LeaseTaken": "when leased blocks are taken back",
                "Encoded": "whether an item is encoded in parts",
                "StatesKept": "when recurrent states are kept",
                "Evicted": "when encoder outputs are evicted",
                "Leased": "when a session's blocks are kept",
                "Stalled": "when a stall is reported",
            }[kind]
    if "Dispatched" in both:
        return "whether a step is decided while another step runs"
    if "Scheduled" in both:
        return "whether the running requests are scheduled"
    return "which event comes next"


def sides(found: Divergence, decode: Decode | None = None) -> list[tuple[str, str, str]]:
    """Return (field, logged, derived) as text for every field that differs. `decode` converts token ids to
    text.
    """
    logged, derived = found.events
    if found.field == CRASH:
        return [(found.field, str(found.logged), str(found.derived))]
    # Another engine recorded the log, and a whole scheduling call differs.
    if logged is None and derived is None and not found.field.startswith(INVARIANT):
        return [(found.field, str(found.logged)[:300], str(found.derived)[:300])]
    if logged is None or derived is None or type(logged) is not type(derived):
        return [(found.field, _event(logged, found, decode), _event(derived, found, decode))]
    names = [name for name in logged.__struct_fields__ if getattr(logged, name) != getattr(derived, name)]
    if not names or found.field not in names:
        return [(found.field, str(found.logged)[:300], str(found.derived)[:300])]
    names = ["digest"] if isinstance(logged, ev.Checkpoint) else names
    return [
        (name, _value(logged, name, found, decode), _value(derived, name, found, decode)) for name in names
    ]


def _event(event: ev.Event | None, found: Divergence, decode: Decode | None) -> str:
    """Return the event's kind, with the fields that differ from their defaults."""
    if event is None:
        return str(found.derived)[:300] if found.field == "event" else NOTHING
    return f"{type(event).__name__}: {event_text(event, found, decode)}".removesuffix(": ")


def event_text(event: ev.Event, found: Divergence, decode: Decode | None = None) -> str:
    """Return the fields of an event that differ from their defaults. Columns are shown as lists, and rows by
    their requests' names.
    """
    parts = []
    defaults = dict(zip(reversed(event.__struct_fields__), reversed(event.__struct_defaults__), strict=False))
    for name in event.__struct_fields__:
        value = getattr(event, name)
        means_same = isinstance(event, ev.Scheduled) and name in _SAME
        if means_same or name not in defaults or value != defaults[name]:
            parts.append(f"{name} {_value(event, name, found, decode)}")
    return ", ".join(parts)


# Fields in SCHEDULED for which None means "the same rows as before" or "a token for each row".
_SAME = {"rows", "num_tokens"}
_TOKENS = {"prompt", "token_ids", "drafts", "outputs"}
_ROWS = {"row", "for_row"}


def _value(event: ev.Event, name: str, found: Divergence, decode: Decode | None) -> str:
    value = getattr(event, name)
    if isinstance(event, ev.Scheduled) and name == "rows":
        rows = found.last_rows if value is None else _ints(value)
        return ("the same rows as the step before: " if value is None else "") + _named(rows, found)
    if isinstance(event, ev.Scheduled) and name == "num_tokens":
        return "one token each" if value is None else _per_row(event, _ints(value), found)
    if name in _ROWS and isinstance(value, int):
        return _named([value], found) if value >= 0 else "any row"
    if name == "rows" and isinstance(value, bytes):
        return _named(_ints(value), found)
    if name in _TOKENS and isinstance(value, bytes):
        return tokens_text(_ints(value), decode)
    if name in ("encode", "evict", "keys", "used"):
        return _media(value, found)
    if isinstance(value, bytes):
        if len(value) % 4 or name in ("digest", "columns", "requests", "envelope", "digests"):
            return value[:16].hex() or "none"
        return _list(_ints(value))
    return str(value)[:300]


def tokens_text(tokens: list[int], decode: Decode | None = None) -> str:
    """Return the first token ids and the number of further token ids. With `decode`, add the first tokens'
    text.
    """
    shown = _list(tokens)
    if decode is None or not tokens:
        return shown
    return f"{shown} = {decode(tokens[:MAX_SHOWN])!r}"


def _ints(value: bytes) -> list[int]:
    return np.frombuffer(value[: len(value) // 4 * 4], np.int32).tolist()


def _list(values: list[int]) -> str:
    more = f" and {len(values) - MAX_SHOWN} more" if len(values) > MAX_SHOWN else ""
    return f"{values[:MAX_SHOWN]}{more}"


def _named(rows: Sequence[int], found: Divergence) -> str:
    texts = [f"{found.rows[row]} (row {row})" if row in found.rows else f"row {row}" for row in rows]
    more = f" and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return (", ".join(texts[:MAX_SHOWN]) or "none") + more


def _per_row(event: ev.Scheduled, counts: list[int], found: Divergence) -> str:
    rows = found.last_rows if event.rows is None else _ints(event.rows)
    if len(rows) != len(counts):
        return _list(counts)
    pairs = [f"{found.rows.get(row, f'row {row}')} {count}" for row, count in zip(rows, counts, strict=True)]
    more = f" and {len(pairs) - MAX_SHOWN} more" if len(pairs) > MAX_SHOWN else ""
    return f"{', '.join(pairs[:MAX_SHOWN])}{more} (together {sum(counts)})"


def _media(value: Sequence, found: Divergence) -> str:
    texts = []
    for each in value[:MAX_SHOWN]:
        if isinstance(each, bytes):
            texts.append(each.hex()[:8])
        else:
            key, row, index = each
            texts.append(f"item {index} of {found.rows.get(row, f'row {row}')} ({key.hex()[:8]})")
    return ", ".join(texts) or "none"


def next_commands(folder: Path, found: Divergence) -> list[str]:
    """Return the two commands to run next, quoted for a shell."""
    log = shlex.quote(str(folder))
    look = f"mmengine log show {log} --step {found.step}"
    if found.event == ev.Checkpoint.__name__ or found.event not in _STEP and not found.request_id:
        look = f"mmengine log show {log} --at {found.step}"
    if found.field == CRASH:
        look = f"mmengine log show {log} --at -1"
        return [look, f"mmengine log minimize {log} --failing crash -o small"]
    if found.field.startswith(INVARIANT) or found.broken is not None:
        name = found.broken.rule if found.broken else found.field.removeprefix(INVARIANT)
        name = "stalled" if name == PROGRESS else name
        return [look, f"mmengine log minimize {log} --failing {shlex.quote(name)} -o small"]
    if found.request_id.isprintable() and found.request_id:
        return [look, f"mmengine log why {log} {shlex.quote(found.request_id)}"]
    return [look, f"mmengine log verify {log} --invariants"]
