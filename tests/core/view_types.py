"""Functions with reads and writes through a View, for mypy. `make check` fails if a read is refused or a
write is accepted. An accepted write has an unused `type: ignore`, which is an error. `test_view.py` runs the
writes.
"""

import numpy as np

from mmengine.core.state.view import View


def reads(view: View, row: int, rows: np.ndarray) -> list[int]:
    known = view.num_tokens[view.running] - view.num_computed[rows]
    known[0] = 1  # a computed result is an ordinary, writable array
    request = view.requests["a"]
    names = [one.request.request_id for one in view.tenants.rest()]
    hits = view.blocks.references[view.blocks.peek(2)] == 0
    over = (view.num_tokens >= view.max_total) | (view.ended != 0)
    free = view.free_rows[-1] + view.blocks.num_free + view.encoder.used + len(view.flights)
    return [request.row, len(names), int(hits.sum()), int(over.sum()), free, view.requests_by_row[row].row]


def writes(view: View, row: int, rows: np.ndarray) -> None:
    view.num_tokens[row] = 1  # type: ignore
    view.num_tokens[rows] += 1  # type: ignore
    view.content[row] = 1  # type: ignore
    view.token_ids[row, 0] = 1  # type: ignore
    view.block_table[row, :1] = 1  # type: ignore
    view.running[0] = 1  # type: ignore
    view.step_rows[0] = 1  # type: ignore
    view.last_rows[0] = 1  # type: ignore
    view.num_tokens = rows  # type: ignore
    view.running = rows  # type: ignore
    view.step = 1  # type: ignore
    view.tokens_left += 1  # type: ignore
    view.is_open = False  # type: ignore
    view.requests["b"] = view.requests["a"]  # type: ignore
    del view.requests["a"]  # type: ignore
    view.requests.clear()  # type: ignore
    view.requests = {}  # type: ignore
    view.suspects["a"] = None  # type: ignore
    view.requests_by_row[row] = None  # type: ignore
    view.blocks.references[0] = 1  # type: ignore
    view.blocks.content[0] = 1  # type: ignore
    view.blocks.num_free = 1  # type: ignore
    view.blocks.take_new(rows)  # type: ignore
    view.blocks.release(rows)  # type: ignore
    view.blocks.index.clear()  # type: ignore
    view.blocks = None  # type: ignore
    view.encoder.add(b"key", 1)  # type: ignore
    view.encoder.evict(b"key")  # type: ignore
    view.encoder.entries.clear()  # type: ignore
    view.encoder.idle.clear()  # type: ignore
    view.encoder.idle[b"key"] = None  # type: ignore
    view.encoder.used = 0  # type: ignore
    view.waiting.clear()  # type: ignore  # a list
    view.waiting[0] = view.waiting[1]  # type: ignore  # a list
    view.free_rows.append(1)  # type: ignore  # a list
    view.free_rows[0] = 1  # type: ignore  # a list
    view.cancelled.append("a")  # type: ignore  # a list
    view.grammar_failed.append("a")  # type: ignore  # a list
    view.thrashing.clear()  # type: ignore  # a list
    view.encoder.dropped.append(b"key")  # type: ignore  # a list
    view.step_evicted.append(b"key")  # type: ignore  # a list
    view.step_copies["copy"].append(rows)  # type: ignore  # a list
    view.flights.clear()  # type: ignore  # a list
    view.requests["a"].failures += 1  # type: ignore  # a request
    view.requests["a"].row = 1  # type: ignore  # a request
    view.requests["a"].tokens[0] = 1  # type: ignore  # a request
    view.requests["a"].held_media.add(1)  # type: ignore  # a request
    view.waiting[0].detail = "gone"  # type: ignore  # a request
    view.requests_by_row[row].cancelled = "cancelled"  # type: ignore  # a request
    view.flights[0].rows[0] = 1  # type: ignore  # a request
    view.goodput.admit(row)  # type: ignore  # a request
