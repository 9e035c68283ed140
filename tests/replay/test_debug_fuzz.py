"""Runs the debugger on logs with changed or missing records. Each command must succeed or raise a single-line
error, and so must writing the HTML page. The debugger's state must equal the state from a plain walk over the
log.
"""

import random

import pytest

from mmengine.errors import MMEngineError
from mmengine.events.log import LogReader
from mmengine.replay.debug import open_debugger
from mmengine.replay.debug.commands.session import Session
from mmengine.replay.debug.page.write import write_debug_page
from mmengine.replay.debug.state_diff import values_of
from mmengine.replay.findings import Findings
from tests.events.logs import rewrite
from tests.replay.runs import busy_run
from tests.replay.test_debug_core import WORDS
from tests.replay.test_replay_hostile import spoiled

PAIRED = ("difference", "align", "both where", "other step", "other rs", "compare", "both info queue", "c")
NUM_MUTANTS, NUM_COMMANDS, NUM_PAGES = 8, 12, 2


def mutants(folder, records, rng, count):
    """Yield logs with up to three changed or missing records."""
    for number in range(count):
        changed = list(records)
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.randrange(1, len(changed))
            record, chance = changed[at], rng.random()
            if chance < 0.6:
                changed[at] = type(record)(0, record.step, record.mono_ns, spoiled(record.event, rng))
            elif chance < 0.8:
                time_ns = rng.choice([0, 1, 2**40, 2**62, 2**64 - 1])
                changed[at] = type(record)(0, record.step, time_ns, record.event)
            else:
                del changed[at]
        yield rewrite(changed, folder / str(number))


def outcome(call):
    """Return True if the call returned, and False if it raised an error with a single line."""
    try:
        call()
    except MMEngineError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("in_flight", [1, 2])
def test_commands_on_spoiled_logs(tmp_path, in_flight):
    whole = tmp_path / "whole"
    busy_run(whole, num_requests=10, max_in_flight=in_flight)
    rng = random.Random(in_flight)
    opened = moved = 0
    for folder in mutants(tmp_path, list(LogReader(whole)), rng, NUM_MUTANTS):
        found = []
        if not outcome(lambda f=folder, found=found: found.append(open_debugger(f, Findings()))):
            continue
        (debugger,) = found
        debugger.navigator.marks.every_records = 24
        opened += 1
        session = Session(debugger, open_debugger(whole, Findings()))
        for _ in range(NUM_COMMANDS):
            line = rng.choice(WORDS if rng.random() < 0.6 else PAIRED)
            moved += outcome(lambda session=session, line=line: session.run(line))
        plain = open_debugger(folder, Findings()).navigator
        position = debugger.navigator.position

        def walk(plain=plain, position=position):
            while plain.position < position and plain.record is not None:
                plain.advance()

        if outcome(walk):
            assert values_of(plain.state) == values_of(debugger.navigator.state), folder
    assert opened > NUM_MUTANTS // 2 and moved > opened * NUM_COMMANDS // 4


def test_pages_of_spoiled_logs(tmp_path):
    busy_run(tmp_path / "whole", num_requests=5)
    rng, records = random.Random(5), list(LogReader(tmp_path / "whole"))
    for folder in mutants(tmp_path, records, rng, NUM_PAGES):
        page = folder.with_suffix(".html")
        if outcome(lambda folder=folder, page=page: write_debug_page(folder, page, Findings())):
            assert page.stat().st_size > 10_000
