"""Tests that a hostile log causes a finding or a one-line error, but no traceback or large allocation."""

import random
import subprocess
import sys
from itertools import accumulate

import msgspec
import numpy as np
import pytest

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.errors import CorruptLog, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.events.log import LogReader
from mmengine.replay import request_lines, step_lines, verify
from mmengine.replay.findings import Findings
from mmengine.request import MediaItem, SamplingParams
from tests.core.small_engine import settings_of
from tests.events.logs import column, rewrite, write_log
from tests.forked import WITH_OWN_PEAK
from tests.replay.plausible import with_false_decisions
from tests.replay.runs import busy_run

replace = msgspec.structs.replace
LOOKS = {"verify": verify, "requests": request_lines, "steps": lambda folder: list(step_lines(folder))}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    busy_run(folder, num_requests=16)
    return list(LogReader(folder))


def started(decision_version=DECISION_VERSION, **settings):
    config = settings_of().as_dict() | settings
    return ev.Started(1, "0.1.0", decision_version, config, {}, config["num_blocks"])


HOSTILE_SETTINGS = [
    {"max_num_seqs": 10**12},
    {"max_num_seqs": -1},
    {"max_num_seqs": True},
    {"max_num_seqs": "64"},
    {"max_num_seqs": 65536, "token_budget": 65536, "max_model_len": 2**24, "num_blocks": 2**22},
    {"num_blocks": 2**22, "block_size": 1024},
    {"num_blocks": 2**23},
    {"num_blocks": 0},
    {"num_blocks": 1},
    {"max_model_len": 0},
    {"max_model_len": 10**6},
    {"block_size": 3},
    {"token_budget": 0},
    {"encoder_budget": -5},
    {"checkpoint_interval": 0},
    {"policy": "none of ours"},
    {"policy": None},
    {"settings from tomorrow": 1},
    {"eos_token_ids": ["</s>"]},
]


@pytest.mark.parametrize("settings", HOSTILE_SETTINGS, ids=str)
@pytest.mark.parametrize("look", LOOKS)
def test_impossible_settings_are_refused(tmp_path, settings, look):
    event = started()
    event = replace(event, config=event.config | settings)
    log = write_log(tmp_path / "log", [event])
    with pytest.raises(CorruptLog, match="STARTED in") as error:
        LOOKS[look](log)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


BIG = {"max_num_seqs": 65536, "token_budget": 65536, "num_blocks": 2**22}


@pytest.mark.parametrize("max_model_len, refused, mib", [(2**16, True, 10), (2**15, False, 200)])
def test_settings_take_little_memory(tmp_path, max_model_len, refused, mib):
    """Settings over the limit allocate nothing. The largest valid settings take little physical memory."""
    write_log(tmp_path / "log", [started(**BIG, max_model_len=max_model_len)])
    program = (
        "import pathlib, resource, sys\n"
        "from mmengine.errors import CorruptLog\n"
        "from mmengine.replay import verify\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    verify(pathlib.Path(sys.argv[1]))\n"
        "except CorruptLog as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [*WITH_OWN_PEAK, sys.executable, "-c", program, str(tmp_path / "log")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert ("has more rows" in lines[0]) == refused and int(lines[-1]) < mib * 1024


SAMPLING = SamplingParams(max_tokens=2, seed=1)


def queued(name="a", prompt=(1, 2, 3), media=()):
    return ev.Queued(name, column(*prompt), SAMPLING, tuple(media))


def placed(*runs):
    return MediaItem(b"\1" * 32, "image", runs, (1, 2, 2))


ADMITTED = ev.Admitted("a", 0, 3, b"", column(1))
RAN = ev.Executed(column(5))
# Events after STARTED. The last event of each list is invalid. `verify` reports an invalid decision as a
# divergence, or as a broken invariant if it cannot derive decisions.
OBSERVED = {
    "a prompt longer than any": [queued(prompt=range(64))],
    "an empty prompt": [queued(prompt=())],
    "a prompt of half a token": [ev.Queued("a", b"\1\2\3", SAMPLING)],
    "a negative token": [queued(prompt=(1, -1))],
    "an id in use": [queued(), ev.Queued("a", column(1), SAMPLING)],
    "media far away": [queued(media=[placed((0, 2**62))])],
    "media before the prompt": [queued(media=[placed((-(2**62), 3))])],
    "media without a run": [queued(media=[placed()])],
    "an empty run": [queued(media=[placed((1, 0))])],
    "media that overlap": [queued(media=[placed((0, 2)), placed((1, 1))])],
    "more media than allowed": [queued(media=[placed((0, 1))] * 65)],
    "a second start": [started()],
    "half a token": [queued(), ADMITTED, ev.Executed(b"\1\2\3\4\5")],
}
DECIDED = {
    "a cancel of nobody": [ev.Cancelled("nobody", "cancelled")],
    "an end of a number": [queued(), ADMITTED, ev.Executed(column(1), ((2**40, "eos"),))],
    "too many tokens": [queued(), ADMITTED, ev.Executed(column(1, 2))],
    "no tokens": [queued(), ADMITTED, ev.Executed(b"")],
    "an error of a negative row": [queued(), ADMITTED, ev.Executed(column(1), errors=((-7, "x"),))],
    "tokens of no step": [ev.Executed(column(1))],
    "admitting an unknown request": [ev.Admitted("nobody", 0, 1, b"", column(1))],
    "admitting twice": [queued(), ADMITTED, ADMITTED],
    "a row out of range": [queued(), replace(ADMITTED, row=2**40)],
    "a negative row": [queued(), replace(ADMITTED, row=-1)],
    "a block out of range": [queued(), replace(ADMITTED, new_blocks=column(65))],
    "a negative block": [queued(), replace(ADMITTED, new_blocks=column(-1))],
    "the dummy block": [queued(), replace(ADMITTED, new_blocks=column(0))],
    "a hit out of range": [queued(), replace(ADMITTED, cached_blocks=column(2**31 - 1))],
    "half a block": [queued(), replace(ADMITTED, new_blocks=b"\1")],
    "more blocks than a row": [queued(), replace(ADMITTED, new_blocks=column(*range(1, 20)))],
    "no tokens for a row": [queued(), replace(ADMITTED, num_tokens=0)],
    "billions of tokens": [queued(), replace(ADMITTED, num_tokens=2**31)],
    "work on no item": [queued(), replace(ADMITTED, encode=((b"k", 0, 3),))],
    "work on no row": [queued(), replace(ADMITTED, encode=((b"k", 99, 0),))],
    "evicting nothing": [queued(), replace(ADMITTED, evict=(b"k",))],
    "scheduling a row out of range": [queued(), ADMITTED, RAN, ev.Scheduled(column(99), None)],
    "scheduling a negative row": [queued(), ADMITTED, RAN, ev.Scheduled(column(-1), None)],
    "scheduling billions": [queued(), ADMITTED, RAN, ev.Scheduled(None, column(2**31 - 1), column(2))],
    "scheduling less than nothing": [queued(), ADMITTED, RAN, ev.Scheduled(None, column(-5))],
    "scheduling more than the budget": [
        queued(),
        ADMITTED,
        RAN,
        ev.Scheduled(column(0, 0), column(40, 40), column(2)),
    ],
    "counts for other rows": [queued(), ADMITTED, RAN, ev.Scheduled(column(0), column(1, 1))],
    "half a row": [queued(), ADMITTED, RAN, ev.Scheduled(b"\1\2", None)],
    "preempting a row out of range": [queued(), ADMITTED, RAN, ev.Preempted("a", 99, "recompute", "x")],
    "preempting an empty row": [queued(), ADMITTED, RAN, ev.Preempted("a", 3, "recompute", "x")],
}


def write_steps(folder, events):
    """Write a log with these events. Each event's step number follows from the events before it."""
    steps = accumulate(isinstance(event, (ev.Executed, ev.Failed)) for event in [None, *events])
    return rewrite([Record(0, step, 0, event) for step, event in zip(steps, events)], folder)


def named(events):
    """Return a pattern for the error about the last event."""
    return rf"^record {len(events) - 1} \(step \d+, {type(events[-1]).__name__}\) contradicts"


@pytest.mark.parametrize("name", OBSERVED)
@pytest.mark.parametrize("decision_version", [DECISION_VERSION, 99])
def test_a_false_observation_is_refused_by_all_commands(tmp_path, name, decision_version):
    events = [started(decision_version), *OBSERVED[name]]
    log = write_steps(tmp_path / "log", events)
    for look in LOOKS.values():
        with pytest.raises(CorruptLog, match=named(events)):
            look(log)


# Name in DECIDED -> (the invariant that the last event breaks, whether the state can still apply the event).
# Other names in DECIDED make the log corrupt.
BROKEN_RULES = {
    "admitting an unknown request": ("queue", False),
    "admitting twice": ("queue", False),
    "a row out of range": ("rows", False),
    "a negative row": ("rows", False),
    "a block out of range": ("blocks", False),
    "a negative block": ("blocks", False),
    "the dummy block": ("blocks", False),
    "a hit out of range": ("blocks", False),
    "more blocks than a row": ("computed", False),
    "no tokens for a row": ("computed", False),
    "billions of tokens": ("computed", False),
    "work on no item": ("encoder", False),
    "work on no row": ("encoder", False),
    "evicting nothing": ("fold", False),
    "scheduling a row out of range": ("rows", False),
    "scheduling a negative row": ("rows", False),
    "scheduling billions": ("budgets", False),
    "scheduling less than nothing": ("budgets", False),
    "scheduling more than the budget": ("rows", True),
    "preempting a row out of range": ("rows", False),
    "preempting an empty row": ("rows", False),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_false_decision(tmp_path, name):
    lie = DECIDED[name]
    at = len(lie)
    report = verify(write_steps(tmp_path / "log", [started(), *lie]))
    assert report.divergence.sequence == at and report.divergence.logged != report.divergence.derived
    other = write_steps(tmp_path / "other", [started(99), *lie])
    if name not in BROKEN_RULES:
        for look in LOOKS.values():
            with pytest.raises(CorruptLog, match=named([None, *lie])) as error:
                look(other)
            assert "\n" not in str(error.value)
        return
    rule, can_fold = BROKEN_RULES[name]
    found = verify(other).divergence
    assert (found.sequence, found.field) == (at, f"invariant {rule}") and "\n" not in found.derived
    for look in (request_lines, lambda folder, findings: list(step_lines(folder, findings))):
        findings = Findings()
        look(other, findings)
        first = findings.listed[0]
        assert (first.sequence, first.rule, first.is_last) == (at, rule, not can_fold)
        assert "\n" not in str(first) and len(str(first)) < 400


def spoiled(event, rng):
    """Return the event with another value in a random field. The value fits the field's type."""
    fields = event.__struct_fields__
    if not fields:
        return ev.Delivered("x")
    name = rng.choice(fields)
    value = getattr(event, name)
    if isinstance(value, bytes):
        numbers = np.frombuffer(value[: len(value) // 4 * 4], np.int32).copy()
        if len(numbers) and rng.random() < 0.8:
            odd = [-1, 0, 1, 5, 18, 19, 10**6, 2**31 - 1, -(2**31)]
            numbers[rng.randrange(len(numbers))] = rng.choice(odd)
            value = numbers.tobytes()
        else:
            value = rng.choice([value[:-1], value + b"\0\0\0\0", value * 2, b""])
    elif isinstance(value, int):
        value = rng.choice([-1, 0, 1, 7, 99, 2**31, 2**62, -(2**62)])
    elif isinstance(value, str):
        value = rng.choice(["", "r0", "r3", "nobody", "\0", "stop", "rejected"])
    elif isinstance(value, tuple):
        value = value[1:] if value and rng.random() < 0.5 else value * 3
    elif value is None:
        value = rng.choice([b"", column(0), column(1, 2), column(-1)])
    try:
        return replace(event, **{name: value})
    except TypeError:
        return event


@pytest.mark.parametrize("decision_version", [DECISION_VERSION, 99])
def test_any_change_gives_a_result_or_a_log_error(records, tmp_path, decision_version):
    """Changes, drops, repeats or swaps one or two records in each of 120 logs. Each command returns a result
    or raises a LogError.
    """
    rng = random.Random(decision_version)
    beginning = replace(records[0].event, decision_version=decision_version)
    outcomes = {"ok": 0, "parted": 0, "refused": 0}
    for number in range(120):
        changed = [type(records[0])(0, 0, 0, beginning), *records[1:]]
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(1, len(changed) - 1)
            record = changed[at]
            what = rng.random()
            if what < 0.7:
                event = spoiled(record.event, rng)
                changed[at] = type(record)(record.sequence, record.step, record.mono_ns, event)
            elif what < 0.8:
                del changed[at]
            elif what < 0.9:
                changed.insert(at, changed[rng.randrange(1, len(changed))])
            else:
                changed[at], changed[at + 1] = changed[at + 1], changed[at]
        log = rewrite(changed, tmp_path / str(number))
        look = rng.choice([verify, *LOOKS.values()])
        try:
            report = look(log)
            outcomes["ok" if look is not verify or report.ok else "parted"] += 1
        except LogError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 5, outcomes


def test_false_decisions_in_range_give_findings(records, tmp_path):
    """Invalid decisions whose values are in range can be applied to the state. The tools find a broken
    invariant, and can read some logs to the end.
    """
    rng, outcomes = random.Random(0), {"last": 0, "passed": 0, "nothing": 0, "refused": 0}
    for number in range(30):
        log, findings = rewrite(with_false_decisions(records, rng), tmp_path / str(number)), Findings()
        try:
            request_lines(log, findings)
            outcomes["last" if findings.last else "passed" if findings else "nothing"] += 1
        except LogError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert outcomes["last"] > 5 and outcomes["passed"] > 0, outcomes


def test_a_step_has_no_more_rows_than_the_engine(tmp_path):
    """SCHEDULED without rows adds the last rows to the step again. Reading stops when a step has more rows
    than the engine, so a small log cannot take much memory.
    """
    again = [ev.Scheduled(None, None)] * 2000
    log = write_steps(tmp_path / "log", [started(99), queued(), ADMITTED, RAN, *again])
    findings = Findings()
    request_lines(log, findings)
    assert findings.last.rule == "rows" and findings.last.value == 5 and findings.last.sequence == 8
