"""Builds the tables and lines that `mmengine log show` prints."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mmengine.cli.logs.printing import clean, ms, printable, wall

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.queries.request_events import RequestEvent
    from mmengine.replay.queries.state_report import SessionReport, StateReport
    from mmengine.replay.queries.step_report import BatchRow, StepReport
    from mmengine.replay.queries.summaries import RequestLine, StepLine


def request_table(
    lines: Iterable["RequestLine"], total: int = 0, *, with_wall: bool = False, with_queued: bool = False
) -> Table:
    """Return a table of requests. `total`: the number of selected requests, for the caption."""
    lines = list(lines)
    clients = ["client's id"] if any(line.client_ids for line in lines) else []
    arrived = ["arrived"] if with_wall else []
    queued = ["queued ms"] if with_queued else []
    drafts = ["drafts kept"] if any(line.num_drafts for line in lines) else []
    through = ["through"] if any(line.api for line in lines) else []
    table = Table(
        *("request", *clients, *through, *arrived, "prompt", "media", "cached", "tokens", *drafts),
        *("preempted", *queued, "first ms", "total ms", "end"),
    )
    if total > len(lines):
        table.caption = f"{len(lines)} of {total} requests: --limit {total}"
    for line in lines:
        counts = [line.num_prompt_tokens, line.num_media, line.num_cached_tokens, line.num_output_tokens]
        kept = [f"{line.num_accepted} of {line.num_drafts}" for _ in drafts]
        times = *(ms(line.admitted_ns) for _ in queued), ms(line.first_token_ns), ms(line.end_ns)
        figures = *map(str, counts), *kept, str(line.num_preemptions), *times
        known = ", ".join(line.client_ids)
        shown = (line.request_id, *(known for _ in clients), *(line.api for _ in through))
        when = (wall(line.wall_ns) for _ in arrived)
        table.add_row(*map(clean, shown), *when, *figures, clean(_end(line)))
    return table


def request_text(line: "RequestLine") -> str:
    """Return one line of text about a request that has ended."""
    return printable(
        f"step {line.end_step}  {line.request_id}  {line.num_prompt_tokens} + {line.num_output_tokens} "
        f"tokens, {line.num_cached_tokens} cached, {_drafts(line)}{line.num_preemptions} preemptions, first "
        f"{ms(line.first_token_ns)} ms, all {ms(line.end_ns)} ms, {_end(line)}"
    )


def _drafts(line: "RequestLine") -> str:
    return f"{line.num_accepted} of {line.num_drafts} drafts kept, " if line.num_drafts else ""


def _end(line: "RequestLine") -> str:
    end = line.finish_reason or "unfinished"
    return f"{end}: {line.detail}" if line.detail else end


def step_table(lines: Iterable["StepLine"]) -> Table:
    table = Table(
        *("step", "rows", "tokens", "admitted", "encoded", "preempted", "running", "waiting", "free"),
        *("encoder", "ms", ""),
    )
    for line in lines:
        counts = (
            *(line.step, line.num_rows, line.num_tokens, line.num_admitted, line.num_encoded),
            *(line.num_preempted, line.num_running, line.num_waiting, line.num_free_blocks),
            line.encoder_used,
        )
        table.add_row(*map(str, counts), f"{line.device_ms:.2f}", clean(line.failed))
    return table


def step_text(line: "StepLine") -> str:
    text = (
        f"step {line.step}  {line.num_rows} rows, {line.num_tokens} tokens, {line.num_admitted} admitted, "
        f"{line.num_encoded} encoded, {line.num_preempted} preempted; {line.num_running} run, "
        f"{line.num_waiting} wait, {line.num_free_blocks} blocks free, {line.device_ms:.2f} ms"
    )
    return printable(f"{text}, failed: {line.failed}" if line.failed else text)


def life_table(lines: list["RequestEvent"], *, with_wall: bool = False) -> Table:
    """Return a request's events as a table. A long run of steps that each decode one token is one row."""
    table = Table("step", *(["time"] if with_wall else []), "ms", "event", "what")
    for group in _decode_runs(lines):
        first, last = group[0], group[-1]
        when = [wall(first.wall_ns)] if with_wall else []
        if len(group) == 1:
            table.add_row(str(first.step), *when, ms(first.since_ns), first.event, clean(first.text))
            continue
        tokens = [token for line in group for token in line.changed.get("token_ids", ())]
        what = f"decodes {len(tokens)} tokens, one per step, up to token {group[-1].changed['num_tokens']}"
        times = f"{ms(first.since_ns)} to {ms(last.since_ns)}"
        table.add_row(f"{first.step} to {last.step}", *when, times, "Executed", what)
    return table


def life_text(line: "RequestEvent") -> str:
    return printable(f"step {line.step}  {ms(line.since_ns)} ms  {line.event}  {line.text}")


def _decode_runs(lines: list["RequestEvent"]) -> Iterator[list["RequestEvent"]]:
    """Yield groups of events. A long run of plain decode steps is one group. Every other event has its own
    group.
    """
    run: list[RequestEvent] = []
    for line in lines:
        if _is_plain(line):
            run.append(line)
            continue
        yield from _as_groups(run)
        run = []
        yield [line]
    yield from _as_groups(run)


def _as_groups(run: list["RequestEvent"]) -> Iterator[list["RequestEvent"]]:
    if run and run[0].event == "Executed":  # This event has the first answer token.
        yield [run.pop(0)]
    last = [run.pop()] if run and run[-1].event == "Scheduled" else []
    if len(run) > 4:
        yield run
    else:
        yield from ([line] for line in run)
    yield from ([line] for line in last)


def _is_plain(line: "RequestEvent") -> bool:
    changed = line.changed
    match line.event:
        case "Scheduled":
            low, high = changed["tokens"]
            return high - low == 1 and not changed["drafts"] and not changed["encode"]
        case "Executed":
            return len(changed["token_ids"]) == 1 and set(changed) == {"token_ids", "num_tokens"}
    return False


def step_tables(report: "StepReport", limit: int, *, with_wall: bool = False) -> Iterator[Table | str]:
    when = f"{report.mono_ns / 1e6:.1f} ms after the log's start"
    if with_wall and (time := wall(report.wall_ns)):
        when += f" ({time})"
    took = f", {report.device_ns / 1e6:.2f} ms on the device" if report.device_ns else ""
    outcome = {"": "; the log has no result", "executed": f"; executed{took}"}.get(
        report.outcome, f"; FAILED: {report.error}"
    )
    yield clean(f"step {report.step}, decided {when}{outcome}")
    if not report.is_whole:
        yield "the log, or the process that wrote it, ended within this step; decisions may be missing"
    yield _batch_table(report.batch[:limit], len(report.batch))
    budgets = Table("budget", "used", "of")
    for name, budget in report.budgets.items():
        if budget.total:
            budgets.add_row(name, str(budget.used), str(budget.total))
    yield budgets
    if report.part is not None:
        name, item, start, until, work = report.part
        yield clean(f"encodes a part of {name}'s item {item}: {start} to {until} of its work of {work}")
    for name, mode, other in report.preempted:
        yield clean(f"preempted ({mode}): {name}" + (f", in favour of {other}" if other else ""))
    if report.num_evicted:
        yield f"encoder outputs evicted: {report.num_evicted}"
    if report.waits:
        yield _waits_table(report, limit)


def _batch_table(batch: list["BatchRow"], count: int) -> Table:
    table = Table("row", "request", "tokens", "of", "drafts", "samples", "")
    for row in batch:
        span = str(row.first) if row.num_tokens == 1 else f"{row.first} to {row.first + row.num_tokens - 1}"
        notes = [row.start] if row.start else []
        if row.num_cached_tokens:
            notes.append(f"{row.num_cached_tokens} cached")
        if row.encode:
            notes.append(f"encodes item {', '.join(map(str, row.encode))}")
        counts = str(row.known), str(row.num_drafts or "")
        given = "yes" if row.samples else ""
        table.add_row(str(row.row), clean(row.request_id), span, *counts, given, ", ".join(notes))
    if count > len(batch):
        table.caption = f"{count - len(batch)} more rows: --limit {count}"
    return table


def _waits_table(report: "StepReport", limit: int) -> Table:
    table = Table("not scheduled", "why", "")
    for reason in report.waits[:limit]:
        table.add_row(clean(reason.request_id), reason.kind, clean(reason.sentence()))
    if len(report.waits) > limit:
        table.caption = f"{len(report.waits) - limit} more: --limit {len(report.waits)}"
    return table


def state_tables(report: "StateReport", limit: int) -> Iterator[Table | str]:
    yield (
        f"before step {report.step}: {len(report.running)} running, {len(report.waiting)} waiting, "
        f"{report.num_arrived} arrivals and {report.num_preempted} preemptions so far"
    )
    pools = Table("pool", "total", "free", "")
    blocks, encoder = report.blocks, report.encoder
    note = f"{blocks['free_with_content']} free blocks hold prefixes, {blocks['shared']} blocks are shared"
    pools.add_row("KV blocks", str(blocks["total"]), str(blocks["free"]), note)
    free = encoder["capacity"] - encoder["used"]
    note = f"{encoder['items']} items, {encoder['idle']} embeddings of them idle"
    pools.add_row("encoder cache", str(encoder["capacity"]), str(free), note)
    if report.host_blocks["total"]:
        pools.add_row("host blocks", *(str(report.host_blocks[name]) for name in ("total", "free")), "")
    states = report.state_slots
    if states["total"]:
        note = f"{states['kept']} free slots hold states after prefixes"
        pools.add_row("state slots", str(states["total"]), str(states["total"] - states["held"]), note)
    leases = report.leases
    if report.sessions:
        note = f"{len(report.sessions)} sessions hold them between their requests"
        pools.add_row("leases", str(leases["total"]), str(leases["total"] - leases["held"]), note)
    rows = len(report.free_rows) + len(report.running) + len(report.rows_being_left)
    pools.add_row("rows", str(rows), str(len(report.free_rows)), "")
    yield pools
    yield _running_table(report.running[:limit], len(report.running))
    if report.waiting:
        yield _waiting_table(report.waiting[:limit], len(report.waiting))
    if report.sessions:
        yield _sessions_table(report.sessions[:limit], len(report.sessions))
    for flight in report.in_flight:
        yield f"in flight: step {flight['step']}, {len(flight['rows'])} rows, {flight['num_tokens']} tokens"
    yield f"digest {report.digest}"


def _sessions_table(sessions: list["SessionReport"], count: int) -> Table:
    table = Table(
        *("session", "requests", "tokens", "media", "leased blocks", "live request"),
        title="sessions",
        title_justify="left",
    )
    for each in sessions:
        figures = map(str, (each.num_requests, each.num_tokens, each.num_media, each.leased_blocks))
        table.add_row(clean(each.session_id), *figures, clean(each.live))
    if count > len(sessions):
        table.caption = f"{count - len(sessions)} more: --limit {count}"
    return table


def _running_table(running: list[dict[str, Any]], count: int) -> Table:
    table = Table(
        *("row", "request", "prompt", "tokens", "computed", "cached", "max new", "drafts", "blocks", "media"),
        title="running, in admission order",
        title_justify="left",
    )
    names = ("num_prompt_tokens", "num_tokens", "num_computed_tokens", "num_cached_tokens", "max_tokens")
    for each in running:
        figures = [str(each[name]) for name in names]
        held = ", ".join(map(str, each["held_media"]))
        drafts = str(each["num_drafts"] or "")
        table.add_row(
            str(each["row"]), clean(each["request_id"]), *figures, drafts, _ranges(each["blocks"]), held
        )
    if count > len(running):
        table.caption = f"{count - len(running)} more: --limit {count}"
    return table


def _waiting_table(waiting: list[dict[str, Any]], count: int) -> Table:
    table = Table("request", "prompt", "tokens", "", title="waiting, in queue order", title_justify="left")
    for each in waiting:
        notes = []
        if each["preempted"]:
            notes.append("preempted")
        if each["num_swapped_tokens"]:
            notes.append(f"{each['num_swapped_tokens']} tokens on the host")
        if each["waits_for_grammar"]:
            notes.append("grammar not compiled")
        if each.get("waits_for_store"):
            notes.append("waits for its prefix from a store")
        if each["group"]:
            notes.append(f"shares the prompt of {each['group']}")
        if each["priority"]:
            notes.append(f"priority {each['priority']}")
        figures = str(each["num_prompt_tokens"]), str(each["num_tokens"])
        table.add_row(clean(each["request_id"]), *figures, clean(", ".join(notes)))
    if count > len(waiting):
        table.caption = f"{count - len(waiting)} more: --limit {count}"
    return table


def _ranges(numbers: list[int]) -> str:
    """Return the numbers 7, 8, 9, 12 as "7-9, 12"; more than six ranges are truncated."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:6]]
    return ", ".join([*texts, f"… ({len(numbers)})"] if len(ranges) > 6 else texts)
