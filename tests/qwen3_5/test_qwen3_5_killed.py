"""Runs a batch file on a hybrid model, in processes that are killed before a step runs or before the step's
result is logged. The next process recomputes the recurrent states. Answers and log-probabilities are
bit-identical to an uninterrupted run.
"""

import json
import os
import random
import signal
from functools import partial

import pytest

from mmengine.cli.batch import run_batch_file
from mmengine.config import EngineConfig
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from mmengine.serve.engine.engine import Engine
from tests.forked import exit_code_of
from tests.qwen3_5.mtp_heads import add_head
from tests.qwen3_5.tiny import make_text

# Few rows and a small token budget give many steps at which the process can be killed. Prompts share
# prefixes, and therefore recurrent states too.
SETTINGS = {
    "max_model_len": 192,
    "num_blocks": 97,
    "block_size": 4,
    "max_num_seqs": 3,
    "token_budget": 24,
    "num_state_slots": 24,
    "snapshot_every": 8,
    "snapshot_bytes": 4000,
    "draft_policy": "all",
    "num_draft_tokens": 3,
    "num_threads": 1,
    "batch_invariant": True,
    "log_sync": "never",
}
BEGINNING = "What stands at the beginning of several prompts is computed once. "
TEXTS = ("Hello", "Count: 1, 2, 3, 1, 2, 3, 1, 2,", BEGINNING, BEGINNING + "And then?", BEGINNING + "Or not?")


def write_requests(folder):
    folder.mkdir()
    lines = []
    for number, text in enumerate(TEXTS * 2):
        line = {"custom_id": f"q{number}", "messages": [{"role": "user", "content": text}]}
        line |= {"max_tokens": 8 + number, "ignore_eos": True, "logprobs": 2}
        if number % 3 == 0:
            line |= {"temperature": 0.9, "seed": number}
        lines.append(json.dumps(line))
    (folder / "requests").write_text("\n".join(lines))


def run(folder, model, spec, killed_at=None):
    """Run the batch file. `killed_at`: die_at's argument `call`, or None for no kill."""

    def make_engine(resume):
        config = EngineConfig.from_dict(SETTINGS | {"spec": spec})
        log = folder / "log"
        engine = Engine(model, device="cpu", dtype="float32", config=config, log=log, resume=resume)
        if killed_at is not None:
            die_at(engine.built.executor, killed_at)
        return engine

    return run_batch_file(folder / "requests", folder / "answers", folder / "log", make_engine)


def die_at(executor, call):
    """Let `call` + 1 dispatches and collects pass. Then kill the process before the next dispatch or after
    the next collect.
    """
    dispatch, collect, count = executor.dispatch, executor.collect, iter(range(call + 1))

    def here():
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def dispatched(plan):
        here()
        dispatch(plan)

    def collected():
        result = collect()
        here()
        return result

    executor.dispatch, executor.collect = dispatched, collected


def answers(folder):
    """Return the answers, keyed by custom_id, without the fields that a crash may change."""
    found = {}
    for line in (folder / "answers").read_text().splitlines():
        answer = json.loads(line)
        assert answer["custom_id"] not in found, "a request is answered twice"
        for figure in ("cached_tokens", "completion_tokens_details"):
            answer["usage"].pop(figure, None)
        found[answer["custom_id"]] = answer
    return found


@pytest.mark.parametrize("spec", ["suffix", "mtp"])
def test_processes_that_are_killed_give_the_same_answers(tmp_path, spec):
    model = tmp_path / "model"
    model.mkdir()
    add_head(model, make_text(model))
    for name in ("undisturbed", "killed"):
        write_requests(tmp_path / name)
    assert run(tmp_path / "undisturbed", model, spec) == 0
    folder, rng, ends = tmp_path / "killed", random.Random(5), []
    while not ends or ends[-1]:
        ends.append(exit_code_of(partial(run, folder, model, spec, rng.randint(3, 30))))
        assert ends[-1] in (0, -signal.SIGKILL)
    assert len(ends) > 4
    assert answers(folder) == answers(tmp_path / "undisturbed")
    report = verify(folder / "log", invariants=True)
    assert report.ok and report.rederived and not report.unfinished
    events = [record.event for record in LogReader(folder / "log")]
    assert sum(isinstance(event, ev.Recovered) for event in events) == len(ends) - 1
    admitted = [event for event in events if isinstance(event, ev.AdmittedWithState)]
    assert any(event.state_from != ev.NO_STATE for event in admitted)
