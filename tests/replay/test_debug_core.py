"""Tests that the debugger shows the same states as a replay, at positions in any order."""

import random
from contextlib import suppress
from pathlib import Path

import pytest

from mmengine.core.state.digest import state_digest
from mmengine.errors import InvalidRequest, LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.debug import open_debugger
from mmengine.replay.debug.commands.session import Session
from mmengine.replay.debug.facts import Facts
from mmengine.replay.debug.filters import parse_filter
from mmengine.replay.debug.state_diff import values_of
from mmengine.replay.findings import Findings
from mmengine.replay.timeline import fold, open_log
from tests.replay.broken_builds import write_broken, write_restarted
from tests.replay.runs import busy_run, session_run

RECORDED = Path(__file__).parent / "recordings"
EVERY = 24  # records between two saved states; small, so that short logs have many saved states


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("busy") / "log"
    busy_run(folder, num_requests=24, mixed=True)
    return folder


def debugger_of(folder, findings=None):
    debugger = open_debugger(folder, findings)
    debugger.navigator.marks.every_records = EVERY
    debugger.can_evaluate = True
    return debugger


def folded(folder):
    """Return sequence number -> (digest, values, record), from a plain fold: a replay without the debugger.
    `digest` and `values` describe the state before the record.
    """
    states = fold(CheckedLog(folder, findings=Findings()))
    return {record.sequence: (state_digest(state), values_of(state), record) for state, record in states}


def logs(tmp_path):
    """Write four logs. Yield their folders, and the folders in RECORDED."""
    for kind in ("sessions", "over_budget", "hits_twice", "restarted"):
        folder = tmp_path / kind
        if kind == "sessions":
            session_run(folder)
        elif kind == "restarted":
            write_restarted(folder)
        else:
            write_broken(folder, kind)
        yield folder
    yield from sorted(each for each in RECORDED.iterdir() if each.is_dir())


def test_any_position_has_the_state_of_a_plain_fold(busy, tmp_path):
    for number, folder in enumerate((busy, *logs(tmp_path))):
        expected, rng = folded(folder), random.Random(number)
        navigator = debugger_of(folder, Findings()).navigator
        for position in rng.choices(list(expected), k=12):
            navigator.go(position)
            digest, values, record = expected[position]
            assert navigator.position == position and navigator.record == record, folder
            assert state_digest(navigator.state) == digest and values_of(navigator.state) == values, folder
        navigator.go(2**63)
        assert navigator.end == navigator.position, folder
        assert len(navigator.marks.all) > 1, folder


def test_a_limit_on_copies_spreads_them(busy):
    # If the saved states take too much memory, fewer are kept, with more records between them.
    debugger = debugger_of(busy)
    marks = debugger.navigator.marks
    marks._max_bytes = 5 * marks.all[0].saved.num_bytes
    debugger.goto_end()
    assert 1 < len(marks.all) <= 6 and marks.every_records > EVERY
    expected = folded(busy)
    for position in (7, len(expected) - 2, len(expected) // 2):
        debugger.navigator.go(position)
        assert state_digest(debugger.navigator.state) == expected[position][0]


def test_steps_are_those_of_the_timeline_in_both_directions(busy):
    numbers = [(step.number, step.record.sequence) for step in open_log(busy).steps()]
    debugger = debugger_of(busy)
    there = []
    while debugger.step():
        there.append((debugger.navigator.record.step, debugger.navigator.position))
    back = []
    while debugger.step(-1):
        back.append((debugger.navigator.record.step, debugger.navigator.position))
    assert there == numbers and back == numbers[::-1]
    for number, position in random.Random(0).choices(numbers, k=8):
        debugger.goto_step(number)
        assert debugger.navigator.position == position
    with pytest.raises(LogError, match=r"step 99999 .*the last step is"):
        debugger.goto_step(99999)
    assert debugger.navigator.position == position


def test_breakpoints_stop_at_the_same_places_in_both_directions(busy):
    conditions = {
        "event = preempted": lambda state, record, before: isinstance(record.event, ev.Preempted),
        "free_blocks < 3": lambda state, record, before: (
            state.blocks.num_free < 3 and not (before is not None and before < 3)
        ),
    }
    for text, holds in conditions.items():
        expected, before = [], None
        for state, record in fold(CheckedLog(busy)):
            if holds(state, record, before):
                expected.append(record.sequence)
            before = state.blocks.num_free
        debugger = debugger_of(busy)
        debugger.add_breakpoint(text)
        there = []
        while debugger.go_on():
            there.append(debugger.navigator.position)
        back = []
        while debugger.go_back():
            back.append(debugger.navigator.position)
        assert there == expected and back == expected[::-1] and expected, text
        assert debugger.navigator.position == 0


def test_an_expression_and_a_filter_stop_alike(busy):
    # Filters accept = and ==. A Python expression with the same meaning stops at the same records.
    stops = []
    for text in ("waiting >= 2 and running = 5", "waiting >= 2 and running == 5"):
        debugger = debugger_of(busy)
        debugger.add_breakpoint(text)
        found = []
        while debugger.go_on():
            found.append(debugger.navigator.position)
        stops.append(found)
    debugger = debugger_of(busy)
    debugger.add_breakpoint("len(view.waiting) >= 2 and len(view.running) == 5")
    found = []
    while debugger.go_on():
        found.append(debugger.navigator.position)
    assert stops[0] == stops[1] == found and found


def test_the_last_write_is_the_last_change(busy):
    """The expected last change of each block and row comes from comparing all states."""
    debugger = debugger_of(busy)
    debugger.goto_end()
    kinds = [("block", number) for number in range(1, 19)] + [("row", number) for number in range(5)]
    last, before = {}, {}
    walk = debugger.navigator.walk(0)
    for cursor in walk:
        facts = Facts(cursor)
        for kind, number in kinds:
            value = getattr(facts, kind)(number)
            if (kind, number) in before and before[kind, number] != value:
                last[kind, number] = cursor.position - 1
            before[kind, number] = value
    for kind, number in kinds:
        found = debugger.last_write(f"{kind} {number}")
        assert found.position == last[kind, number], (kind, number)
        assert found.text and found.change
    debugger.goto_start()
    assert debugger.last_write("block 3") is None


def test_a_watchpoint_tells_the_values(busy):
    debugger = debugger_of(busy)
    debugger.add_watch("row 0")
    why = debugger.go_on()
    position = debugger.navigator.position
    assert "request  -> r" in why
    debugger.go_on()
    assert debugger.go_back() and debugger.navigator.position == position


def test_a_request_is_followed(busy):
    debugger = debugger_of(busy)
    debugger.goto_request("r3")
    kinds = [type(debugger.navigator.record.event)]
    while debugger.step_request("r3"):
        kinds.append(type(debugger.navigator.record.event))
    assert kinds[0] is ev.Queued and ev.Finished in kinds and kinds[-1] is ev.Delivered
    with pytest.raises(LogError, match="no request in this log has the id 'r999'"):
        debugger.goto_request("r999")


def test_a_time_is_reached(busy):
    debugger = debugger_of(busy)
    times = []
    for cursor in debugger.navigator.walk(0):
        times.append(cursor.time_ns)
    middle = times[len(times) // 2]
    debugger.goto_time(middle / 1e6)
    assert debugger.navigator.cursor.time_ns >= middle
    assert times[debugger.navigator.position - 1] < middle


def test_the_queue_has_the_reasons_of_the_step(tmp_path, busy):
    from mmengine.replay.queries.step_report import step_report

    debugger, session = debugger_of(busy), None
    session = Session(debugger)
    num_checked = 0
    for step in (8, 15, 22, 30):
        session.run(f"goto {step}")
        (table,) = session.run("info queue")
        reasons = {each.request_id: each.sentence() for each in step_report(busy, step).waits}
        for row in table.rows:
            if row[1] in reasons:
                assert row[-1] == reasons[row[1]], (step, row)
                num_checked += 1
    assert num_checked


def test_a_broken_build_has_its_finding_where_the_decision_is(tmp_path):
    findings = Findings()
    session = Session(debugger_of(write_broken(tmp_path / "log", "over_budget"), findings))
    session.run("goto end")
    first = findings.listed[0]
    (text,) = session.run(f"goto event {first.sequence}")
    assert f"  breaks the rule budgets: {first.text}" in text.lines
    (table,) = session.run("decide")
    assert table.rows[0][2] == "differs" and not table.note
    assert any("breaks the rule budgets" in line for line in session.run("info findings")[0].lines)


def test_a_log_that_cannot_be_folded_ends_before_the_decision(tmp_path, busy):
    # The log's last decision cannot be applied, so the debugger stops there and shows a finding.
    from mmengine.events.log import LogReader
    from tests.events.logs import write_log

    records = list(LogReader(busy))
    place = next(n for n, each in enumerate(records) if isinstance(each.event, ev.Scheduled))
    bad = ev.Scheduled(b"\xff\xff\0\0", None)
    folder = write_log(tmp_path / "log", [*(each.event for each in records[:place]), bad])
    session = Session(debugger_of(folder, Findings()))
    session.run("goto end")
    assert session.debugger.navigator.findings.last.sequence == place
    (text,) = session.run("where")
    assert any("a decision that the state cannot take" in line for line in text.lines)


def test_filters_say_what_they_expect():
    for text, expected in {
        "": "empty",
        "nothing < 3": "there is no field 'nothing'",
        "free_blocks << 3": "there is no operator '<<'",
        "free_blocks <": "a comparison is",
        "event = exploded": "there is no event 'exploded'",
        "block x references > 1": "not the number of a block",
        "entry zz references > 1": "not the beginning of a key",
        "step = 1 or step = 2": "'and'",
        "__import__('os')": "a comparison is",
        "step = 1 and " * 40 + "step = 1": "at most 16",
        "x" * 2000: "2000 characters",
    }.items():
        with pytest.raises(InvalidRequest, match=expected):
            parse_filter(text)
    found = parse_filter('request = "a b" and time_ms >= 1.5 and block 3 references > 1')
    assert [each.literal for each in found.comparisons] == ["a b", 1.5, 1]
    assert found.comparisons[2].object == ("block", "3") and found.reads_record


def test_a_page_cannot_run_python(busy):
    debugger = open_debugger(busy)
    session = Session(debugger)
    for line in ("break __import__('os').system('true')", "watch 1 + 1", "print 1 + 1", "last 1 + 1"):
        with pytest.raises(InvalidRequest):
            session.run(line)
    assert session.run("print free_blocks")[0].lines == ["18"]


def test_an_expression_cannot_change_the_state(busy):
    session = Session(debugger_of(busy))
    session.run("goto 5")
    before = state_digest(session.debugger.navigator.state)
    for text in ("view.num_tokens.fill(3)", "view.requests.clear()", "setattr(view, 'step', 3)"):
        with pytest.raises(InvalidRequest, match="the expression failed"):
            session.run(f"print {text}")
    assert state_digest(session.debugger.navigator.state) == before


def test_a_breakpoint_on_an_absent_request_says_how_to_write_it(busy):
    session = Session(debugger_of(busy))
    session.run("break req('r5').tokens > 2")
    with pytest.raises(InvalidRequest, match="lacks is None") as error:
        session.run("continue")
    assert "req('a') and req('a').tokens > 9" in str(error.value)
    session.run("delete 1")
    session.run("break req('r5') and req('r5').tokens > 2")
    assert "breakpoint 2" in session.run("continue")[0].lines[0]


WORDS = (
    "step 3", "rs 2", "si 5", "rsi 4", "c", "rc", "next r3", "rn", "goto 7", "goto end", "goto time 1",
    "goto r5", "goto event 40", "mark a", "goto mark a", "break preempted", "break free_blocks < 9",
    "watch block 3", "watch row 1", "watch request r2", "break entry ab references > 0", "delete 1",
    "delete", "disable 2", "enable 2", "info", "info queue", "info rows", "info blocks",
    "info blocks all", "info prefix", "info encoder", "info drafts", "info sessions", "info adapters",
    "info requests", "info request r4", "info block 4", "info row 2", "list 9", "last block 5",
    "last row 2", "last free_blocks", "last request r2", "diff", "diff 3", "diff a 30", "decide",
    "print step", "print 1 / 0", "help", "help break", "help fields", "request r1", "where", "",
    "goto -1", "zzz", "info block 99999999999", "goto event 999999999999999999999", "goto time nan",
    "goto time -1", "break", "last", "break 'x", "watch", "print", "si -3", "step 99999999999999999999",
    "next \x1b[31m", "info entry 0",
)  # fmt: skip


def test_random_sessions_only_raise_our_errors(busy, tmp_path):
    """After random commands, the state equals a new replay's state. The logs include logs from builds with
    bugs, and logs recorded in vLLM.
    """
    folders = [busy, *logs(tmp_path)]
    for seed in range(13):
        rng = random.Random(seed)
        folder = folders[seed % len(folders)]
        session = Session(debugger_of(folder, Findings()))
        for _ in range(10):
            line = rng.choice(WORDS)
            with suppress(MMEngineError):
                session.run(line)
        navigator = session.debugger.navigator
        plain = debugger_of(folder, Findings()).navigator
        while plain.position < navigator.position:
            plain.advance()
        assert values_of(plain.state) == values_of(navigator.state), (seed, folder)
