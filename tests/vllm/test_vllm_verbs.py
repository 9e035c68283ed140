"""Runs the commands of `mmengine log` on every log that was recorded in vLLM, and on damaged copies."""

import random
import re
import shutil
from pathlib import Path

import pytest

from mmengine.errors import LogError
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.replay.queries.summaries import request_lines
from mmengine.replay.queries.why import why
from tests.cli.cli_process import call_cli
from tests.events.logs import rewrite
from tests.replay.test_replay_hostile import spoiled

HERE = Path(__file__).parent
FOLDERS = [HERE / "recordings", HERE / "recordings" / "faults", HERE.parents[0] / "replay" / "recordings"]
LOGS = {log.name: log for folder in FOLDERS for log in sorted(folder.iterdir()) if any(log.glob("*.mmlog*"))}
SMALL = ["priority_victim", "double_free", "encoder_reference"]
# Exit codes: 0 success; 1 any other error; 2 wrong arguments; 3 a divergence, or a decision that cannot be
# applied; 5 `verify` did not derive the decisions; 6 a truncated log, or `rerun` cannot answer; 13 and 14 a
# log without an end.
CODES = {0, 1, 2, 3, 5, 6, 13, 14}
NUM_MUTANTS, NUM_SOAKED = 100, 2000  # number of damaged logs for each kind of damage
VERBS = {
    "show": ["LOG", "--steps"],
    "show --step": ["LOG", "--step", "3"],
    "why": ["LOG", "REQUEST"],
    "report": ["LOG", "-o", "OUT"],
    "diff": ["LOG", "LOG"],
    "redact": ["LOG", "OUT"],
    "export": ["LOG", "--csv", "-o", "OUT"],
    "debug": ["LOG", "--batch", "--ex", "step", "--ex", "continue", "--ex", "info queue"],
    "rerun": ["LOG"],
    "pending": ["LOG"],
    "verify": ["LOG", "--invariants"],
    "fsck": ["LOG"],
}


def called(verb, log, out, name):
    """Run a command on a log. `out`: a path that does not exist. `name`: a request in the log."""
    values = {"LOG": str(log), "REQUEST": name, "OUT": str(out)}
    return call_cli("log", verb.split()[0], *(values.get(part, part) for part in VERBS[verb]))


@pytest.mark.parametrize("name", LOGS)
def test_every_command_reads_every_recording(tmp_path, name):
    request = request_lines(LOGS[name])[-1].request_id
    for number, verb in enumerate(VERBS):
        done = called(verb, LOGS[name], tmp_path / str(number), request)
        said = done.stdout + done.stderr
        assert "Traceback" not in said and "a bug ended" not in said, (verb, said)
        assert done.returncode in CODES, (verb, done.returncode, said)


@pytest.mark.parametrize("name", ["priority_victim", "chunk_livelock_whole", "draft_budget"])
def test_minimize_needs_vllm_or_a_broken_rule(tmp_path, name):
    done = call_cli("log", "minimize", str(LOGS[name]), "--with", "vllm", "-o", str(tmp_path / "small"))
    assert done.returncode == 1 and "requires vLLM and mmengine_vllm in this environment" in done.stderr


def test_rerun_says_why_it_refuses_an_asynchronous_recording():
    done = call_cli("log", "rerun", str(LOGS["asynchronous"]), "--simulate")
    assert done.returncode == 6 and "vllm 0.32.0 scheduled this log asynchronously" in done.stderr
    assert call_cli("log", "rerun", str(LOGS["priority"])).returncode == 0


def test_rerun_does_not_simulate_several_kv_groups():
    done = call_cli("log", "rerun", str(LOGS["block_groups"]), "--simulate")
    assert done.returncode == 6 and "vllm 0.32.0 scheduled this log with 3 KV groups" in done.stderr
    done = call_cli("log", "rerun", str(LOGS["block_groups"]), "--set", "num_blocks=150")
    assert done.returncode == 2 and "block_groups cannot go with compat" in done.stderr


@pytest.mark.parametrize(
    "name", ["asynchronous", "block_groups", "images", "vllm_032_priority", "vllm_033_async_priority"]
)
def test_why_names_no_difference_in_a_log_that_verifies(name):
    for line in request_lines(LOGS[name])[::7]:
        texts = [claim.text for claim in why(LOGS[name], line.request_id)]
        assert texts and not any("would have" in text or "unlike" in text for text in texts), texts


@pytest.mark.parametrize("name", ["priority", "images", "chunk_livelock_whole"])
def test_why_has_no_row_numbers(name):
    for line in request_lines(LOGS[name])[::9]:
        for claim in why(LOGS[name], line.request_id):
            assert not re.search(r"\brows? \d", claim.text), claim.text


LOOKS = {
    "verify": lambda log: verify(log, invariants=True),
    "why": lambda log: [why(log, line.request_id) for line in request_lines(log)[:2]],
    "redact": lambda log: _cli("redact", log),
    "report": lambda log: _cli("report", log),
}


def _cli(verb, log):
    done = called(verb, log, log.with_name(f"{log.name}.out"), request_lines(log)[-1].request_id)
    assert "Traceback" not in done.stderr and done.returncode in {*CODES, 4, 6}, done.stderr


def look(log, rng, counts):
    """Read a damaged log with a random command, which must return a result or raise a LogError without a line
    break.
    """
    verb = rng.choice(list(LOOKS))
    try:
        LOOKS[verb](log)
        counts["read"] += 1
    except LogError as error:
        assert "\n" not in str(error)
        counts["refused"] += 1


def spoil_records(folder, rng, num_mutants):
    counts = {"read": 0, "refused": 0}
    logs = [list(LogReader(LOGS[name])) for name in SMALL]
    for number in range(num_mutants):
        records = list(rng.choice(logs))
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(len(records))
            record = records[at]
            event = spoiled(record.event, rng)
            records[at] = type(record)(record.sequence, record.step, record.mono_ns, event)
        look(rewrite(records, folder / str(number)), rng, counts)
    assert min(counts.values()) > num_mutants // 20, counts


def spoil_bytes(folder, rng, num_mutants):
    counts = {"read": 0, "refused": 0}
    for number in range(num_mutants):
        log = shutil.copytree(LOGS[rng.choice(SMALL)], folder / str(number))
        path = next(log.glob("*.mmlog*"))
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 1, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        look(log, rng, counts)
    assert counts["refused"] > num_mutants // 2, counts


@pytest.mark.parametrize("spoil", [spoil_records, spoil_bytes])
def test_a_damaged_recording_gives_a_result_or_an_error(tmp_path, spoil):
    spoil(tmp_path, random.Random(48), NUM_MUTANTS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spoil", [spoil_records, spoil_bytes])
def test_many_damaged_recordings(tmp_path, spoil):
    spoil(tmp_path, random.Random(49), NUM_SOAKED)
