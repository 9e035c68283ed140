"""Changes a log's decisions to wrong but plausible values. A replay often accepts such a log, and reaches a
state that no engine can have.
"""

import random

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record

replace = msgspec.structs.replace


def _column(column: bytes | None, high: int, rng: random.Random) -> bytes | None:
    """Return the column with one or two values replaced by a random value below `high` or by the column's
    first value.
    """
    if not column:
        return np.array([rng.randrange(high)], np.int32).tobytes() if rng.random() < 0.3 else column
    values = np.frombuffer(column, np.int32).copy()
    for _ in range(rng.choice([1, 1, 2])):
        values[rng.randrange(len(values))] = rng.choice([rng.randrange(high), values[0]])
    return values.tobytes()


def plausible(event: ev.Event, config: EngineConfig, names: list[str], rng: random.Random) -> ev.Event:
    """Return a decision with a wrong but plausible value, and any other event unchanged."""
    rows, blocks = config.max_num_seqs, config.num_blocks
    match event:
        case ev.Scheduled():
            name, high = rng.choice(
                [
                    ("rows", rows),
                    ("num_tokens", 9),
                    ("num_tokens", 60),
                    ("new_blocks", blocks),
                    ("num_drafts", 4),
                ]
            )
            return replace(event, **{name: _column(getattr(event, name), high, rng)})
        case ev.Admitted():
            name = rng.choice(
                ["cached_blocks", "new_blocks", "num_tokens", "num_computed", "row", "request_id"]
            )
            value = {
                "num_tokens": rng.randrange(1, 40),
                "num_computed": rng.randrange(-1, 40),
                "row": rng.randrange(rows),
                "request_id": rng.choice(names),
            }.get(name)
            if value is None:
                value = _column(getattr(event, name), blocks, rng)
            return replace(event, **{name: value})
        case ev.Preempted():
            return replace(
                event, **rng.choice([{"row": rng.randrange(rows)}, {"request_id": rng.choice(names)}])
            )
        case ev.Finished():
            return replace(event, request_id=rng.choice(names))
        case ev.StatesKept():
            return replace(event, slots=_column(event.slots, max(1, config.num_state_slots), rng))
        case ev.Fetched():
            return replace(event, blocks=_column(event.blocks, blocks, rng))
        case ev.Leased():
            return replace(event, blocks=_column(event.blocks, blocks, rng) or b"")
    return event


def with_false_decisions(records: list[Record], rng: random.Random) -> list[Record]:
    """Return the records with up to eight wrong decisions, and sometimes with a dropped decision. An unknown
    decision version in STARTED keeps the tools from recomputing the decisions.
    """
    first = records[0].event
    config = EngineConfig.from_dict(first.config)
    names = [each.event.request_id for each in records if isinstance(each.event, ev.Queued)]
    changed = [Record(0, 0, records[0].mono_ns, replace(first, decision_version=99)), *records[1:]]
    places = [n for n, each in enumerate(records) if n and type(each.event) not in ev.OBSERVATIONS]
    for at in rng.sample(places, min(len(places), rng.choice([1, 2, 4, 8]))):
        event = plausible(changed[at].event, config, names, rng)
        changed[at] = Record(0, changed[at].step, changed[at].mono_ns, event)
    if rng.random() < 0.3:
        del changed[rng.choice(places)]
    return changed
