"""Tests that the newest snapshot gives the same state and the same undelivered answers as the whole log."""

import random
import shutil
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest

from mmengine.core import undelivered_answers as module
from mmengine.core.engine import EngineCore
from mmengine.core.executor import PromptLogprobs
from mmengine.core.resume import Resume, read_resume_state
from mmengine.core.snapshot import snapshot
from mmengine.core.snapshot.saving import body_of
from mmengine.core.state.digest import state_digest
from mmengine.core.undelivered_answers import UndeliveredAnswers
from mmengine.errors import CorruptLog, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.retention import Undelivered
from mmengine.events.segment import snapshot_sequences
from mmengine.events.snapshots import SnapshotFolder, snapshot_path
from mmengine.replay import verify
from mmengine.request import SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.core.workloads import small_config, small_request
from tests.events.logs import begin_log
from tests.log_copies import copied

WHOLE = Resume(wanted=lambda name: False)  # with a function `wanted`, a reader reads the whole log


class Scoring(SimulatedExecutor):
    """Returns logprobs for about every second request, and prompt logprobs for some of these."""

    def collect(self):
        plan = self._plans[0]
        result = super().collect()
        tokens, place, logprobs, of_prompts = result.token_ids.tolist(), 0, [], []
        for index, row in enumerate(plan.rows[plan.sample].tolist()):
            count = 1 if result.counts is None else int(result.counts[index])
            name = self._requests[row].request_id
            if sum(name.encode()) % 2:
                for token in tokens[place : place + count]:
                    logprobs.append((index, ((token, -0.5), (token + 1, -1.5))))
                if tokens[place] % 3 == 0:
                    ids = np.array([[place, 7], [token, 8]], np.int32)
                    of_prompts.append(PromptLogprobs(index, ids, ids.astype(np.float32) / 3))
            place += count
        return msgspec.structs.replace(result, logprobs=tuple(logprobs), prompt_logprobs=tuple(of_prompts))


@dataclass
class Lives:
    """A log and the processes that write it, one after the other. Each process except the last is killed."""

    rng: random.Random
    folder: object
    config: object
    core: EngineCore | None = None
    tokens: dict[str, list[int]] = field(default_factory=dict)  # request id -> tokens that its consumer got
    logprobs: dict[str, list] = field(default_factory=dict)  # request id -> logprobs that its consumer got
    ended: list[str] = field(default_factory=list)  # requests that have ended and were not delivered
    delivered: set[str] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)  # the request of each token, in the order of sending
    number: int = 0
    now: int = 0

    def clock(self):
        self.now += 1000
        return self.now

    def begin(self, resumed=None):
        rng = self.rng
        writer = LogWriter(
            self.folder,
            reopen=None if resumed is None else "tail",
            segment_bytes=rng.choice([2000, 8000, 10**6]),
            reserve_bytes=0,
        )
        snapshots = SnapshotFolder(self.folder, rng.choice([600, 3000]), rng.choice([7, 40, 1000]))
        options = {"clock": self.clock, "sink": writer, "snapshots": snapshots}
        executor = Scoring(self.config, eos_in=20, fault=lambda step: "planted" if step % 31 == 30 else None)
        if resumed is None:
            self.core = EngineCore(self.config, executor, fingerprints={"weights": "first"}, **options)
            return
        self.tokens = {name: list(answer.token_ids) for name, answer in resumed.answers.items()}
        self.logprobs = {name: list(answer.logprobs or ()) for name, answer in resumed.answers.items()}
        self.ended = [name for name, answer in resumed.answers.items() if answer.reason]
        started, state = resumed.started, resumed.state
        kept = {"started": started, "state": state, "undelivered": resumed.undelivered}
        self.core = EngineCore(self.config, executor, **options, **kept)
        resumed.fingerprints = {"weights": f"of life {self.number}"}
        lost = tuple((name, "its image is lost") for name in list(state.requests)[:1] if rng.random() < 0.2)
        self.core.recover(resumed.recovered(lost), rng.choice(["", "signal"]))

    def ask(self):
        rng, core = self.rng, self.core
        known = list(core.state.requests.values())
        like = rng.choice(known).request if known else None
        one = small_request(rng, f"r{self.number}", self.config, grammars=0.3, like=like)
        self.number += 1
        if rng.random() < 0.2:
            count = min(one.budget(self.config.max_model_len) - 1, 3)
            one = replace(one, outputs=np.arange(count, dtype=np.int32), envelope=b"of a server")
        one = replace(one, deadline_ns=rng.choice([0, 0, 0, 40_000]))
        try:
            core.submit(one)
        except MMEngineError:
            return
        self.tokens[one.request_id] = one.outputs.tolist()
        if one.grammar is not None and rng.random() < 0.8:
            core.inbox.put(ev.GrammarReady(one.request_id))

    def step(self):
        rng, core = self.rng, self.core
        for output in core.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.sent += [output.request_id] * len(output.token_ids)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or ())
            if output.finish_reason not in (None, "rejected"):  # the log has no QUEUED if the queue was full
                self.ended.append(output.request_id)
        if self.ended and rng.random() < 0.4:
            name = self.ended.pop(rng.randrange(len(self.ended)))
            core.delivered(name)
            self.delivered.add(name)
        if rng.random() < 0.05:
            core.cancel(f"r{rng.randrange(self.number)}")

    def live(self, num_requests):
        for _ in range(num_requests):
            self.ask()
            for _ in range(self.rng.randrange(4)):
                self.step()
        self.core.step()  # writes the last deliveries to the log


def told(resumed):
    """Return all values that a continuing process reads from a log, in a comparable form."""
    answers = {
        name: (
            *(answer.queued, answer.token_ids, answer.logprobs, answer.reason, answer.detail),
            answer.num_cached_tokens,
            answer.order,
            None
            if answer.prompt_logprobs is None
            else [part.tolist() for part in answer.prompt_logprobs[1:]],
        )
        for name, answer in resumed.answers.items()
    }
    undelivered = resumed.undelivered.undelivered
    return {
        "digest": state_digest(resumed.state),
        "answers": list(answers.items()),
        "steps": resumed.steps,
        "fingerprints": resumed.fingerprints,
        "started": resumed.started,
        "undelivered": (list(undelivered.begins.items()), undelivered.ended, undelivered.oldest),
    }


def run_lives(tmp_path, seed, num_lives=3, num_requests=14):
    """Run the processes of a log one after the other, and yield the Lives each time a process was killed."""
    rng = random.Random(seed)
    lives = Lives(rng, tmp_path / "log-0", small_config(rng))
    lives.begin()
    for life in range(num_lives):
        lives.live(num_requests)
        dead = lives.folder
        lives.folder = copied(dead, tmp_path / f"log-{life + 1}")
        lives.core.sink.close()  # frees the lock; this folder is not read any more
        shutil.rmtree(dead)
        yield lives
        lives.begin(read_resume_state(lives.folder, Resume()))
    lives.core.sink.close()


def check_orders(lives, answers):
    """For requests with several choices, check that tokens are recorded in the order of delivery."""
    choices = {}
    for name, answer in answers.items():
        choices.setdefault(answer[0].group or name, []).append(name)
    for first, names in choices.items():
        if len(names) > 1 and names[0] == first and not lives.delivered:
            order = [names[index] for index in answers[first][6]]
            seen = [name for name in lives.sent if name in names]
            assert order[: len(seen)] == seen and len(order) - len(seen) <= 8


@pytest.mark.parametrize("seed", range(12))
def test_the_newest_snapshot_and_the_whole_log_agree(tmp_path, seed):
    for lives in run_lives(tmp_path, seed):
        folder = lives.folder
        whole = told(read_resume_state(folder, WHOLE))
        assert told(read_resume_state(folder, Resume())) == whole
        check_orders(lives, dict(whole["answers"]))
        names = {name for name, _ in whole["answers"]}
        for name, answer in whole["answers"]:
            seen, scores = lives.tokens[name], lives.logprobs.get(name, [])
            assert answer[1][: len(seen)] == seen, "tokens that a consumer has got do not change"
            assert (answer[2] or [])[: len(scores)] == scores
        assert names >= set(lives.ended) | set(lives.core.state.requests) - lives.core.inbox.queued
        damaged = snapshot_sequences(folder)[-2:]
        for sequence in damaged:
            path = snapshot_path(folder, sequence)
            data = bytearray(path.read_bytes())
            data[lives.rng.randrange(len(data))] ^= 1
            path.write_bytes(data)
        assert told(read_resume_state(folder, Resume())) == whole, (
            "an older snapshot, or none, gives the same"
        )
    report = verify(folder)
    assert report.ok, report.divergence


def test_no_record_of_before_the_snapshot_is_read(tmp_path, monkeypatch):
    """Only the records after the newest snapshot are read, so damage before it does not matter."""
    (lives,) = run_lives(tmp_path, 1, num_lives=1, num_requests=60)
    folder, starts = lives.folder, []
    begin = LogReader.__init__
    monkeypatch.setattr(
        LogReader, "__init__", lambda self, *args: starts.append(args[2:]) or begin(self, *args)
    )
    answers = read_resume_state(folder, Resume()).answers
    assert answers and starts == [(snapshot_sequences(folder)[-1] + 1,)]
    starts.clear()
    assert read_resume_state(folder, Resume(mode="strict")).answers.keys() == answers.keys()
    assert starts[0] == (), "the mode strict reads the whole log"


def long_run(folder, num_requests=8, **options):
    """Run requests with logprobs whose answers are never delivered, and return the live core."""
    config = settings_of()
    writer = LogWriter(folder, segment_bytes=4000, reserve_bytes=0)
    core = EngineCore(config, Scoring(config), sink=writer, snapshots=SnapshotFolder(folder, **options))
    for number in range(num_requests):
        core.submit(request(f"r{number}", 5 + number, max_tokens=20))
        for _ in range(8):
            core.step()
    return core


def test_the_limit_counts_tokens_with_more_logprobs_than_the_first():
    """The limit counts all (token, logprob) pairs. A token that the grammar forced has fewer pairs than a
    sampled token.
    """
    forced, free = ((-1, 0.0), (-2, 0.0)), tuple((-number, -1.0) for number in range(1, 11))
    assert len(module._Scores([forced, free, free])) == 22


def test_logprobs_that_are_too_long_for_a_snapshot_are_read_from_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_SCORES", 30)
    folder = tmp_path / "log"
    core = long_run(folder, every_bytes=500)
    core.sink.close()
    whole = told(read_resume_state(folder, WHOLE))
    assert sum(len(answer[2] or ()) for _, answer in whole["answers"]) > 60
    assert told(read_resume_state(folder, Resume())) == whole
    monkeypatch.setattr(module, "MAX_SCORES", 10**6)
    assert told(read_resume_state(folder, Resume())) == whole


@pytest.mark.parametrize("change", ["digest", "other requests", "no msgpack"])
def test_answers_in_a_snapshot_that_contradict_it_are_not_believed(tmp_path, change):
    folder = tmp_path / "log"
    core = long_run(folder, every_bytes=10**9)
    state, sequence = core.state, core.sink.next_sequence - 1
    saved = core._snapshots.undelivered.saved()
    if change == "other requests":
        saved = UndeliveredAnswers(state).saved()
    body = body_of(state, core._started, sequence)
    data = snapshot.packed(body, saved)
    if change == "digest":
        core._snapshots.undelivered.fingerprints = {"weights": "of nobody"}
        body.answers = msgspec.msgpack.encode(core._snapshots.undelivered.saved())
        data = snapshot.packed(body)
    if change == "no msgpack":
        body.answers = body.answers[:-1]
        body.answers_digest = snapshot.digest_of(body.answers)
        data = snapshot.packed(body)
    core.sink.close()
    before = told(read_resume_state(folder, WHOLE))
    snapshot_path(folder, sequence).write_bytes(data)
    assert snapshot.newest_before(folder, sequence + 1)[1].sequence == sequence, (
        "the snapshot's state is still usable"
    )
    assert told(read_resume_state(folder, Resume())) == before


def test_a_snapshot_that_is_ahead_of_the_log_is_left_out(tmp_path):
    folder = tmp_path / "log"
    core = long_run(folder, every_bytes=800)
    core.sink.close()
    last = snapshot_sequences(folder)[-1]
    for path in sorted(folder.glob("*.mmlog*")):
        if int(path.name.split(".")[0]) > last - 30:
            path.unlink()
    assert told(read_resume_state(folder, Resume())) == told(read_resume_state(folder, WHOLE))


def test_a_request_that_comes_again_under_its_id_is_another_one():
    undelivered = Undelivered()
    queued = ev.Queued("a", b"", SamplingParams())
    events = [queued, ev.Finished("a", "stop"), queued, ev.Delivered("a")]
    for sequence, event in enumerate(events):
        undelivered.see(event, sequence)
    assert undelivered.begins == {"a": 2} and undelivered.oldest == 2, (
        "DELIVERED belongs to the first request; the second is live"
    )
    undelivered.see(ev.Finished("a", "stop"), 4)
    undelivered.see(ev.Delivered("a"), 5)
    assert undelivered.oldest == Undelivered.NONE and not undelivered.begins


def test_many_short_requests_after_a_long_one_take_no_memory():
    undelivered = Undelivered()
    undelivered.see(ev.Queued("old", b"", SamplingParams()), 0)
    for number in range(1000):
        for event in (
            ev.Queued(f"r{number}", b"", SamplingParams()),
            ev.Finished(f"r{number}", "stop"),
            ev.Delivered(f"r{number}"),
        ):
            undelivered.see(event, number + 1)
    assert undelivered.oldest == 0 and len(undelivered._order) < 100 and not undelivered.ended


def test_wanted_answers_are_forgotten_once_delivered_again(tmp_path):
    """A continued batch wants all answers that its output file lacks, even if they were delivered before. The
    engine forgets the answers after the second delivery.
    """
    folder = tmp_path / "log"
    core = long_run(folder, every_bytes=10**9)
    names = [f"r{number}" for number in range(8)]
    while core.has_work:
        core.step()
    for name in names:
        core.delivered(name)
    core.step()
    core.sink.close()
    resumed = read_resume_state(folder, Resume(wanted=lambda name: True))
    assert list(resumed.answers) == names
    config, writer = core.config, LogWriter(folder, reopen="tail", reserve_bytes=0)
    options = {"started": resumed.started, "state": resumed.state, "undelivered": resumed.undelivered}
    core = EngineCore(
        config, Scoring(config), sink=writer, snapshots=SnapshotFolder(folder, 10**9), **options
    )
    core.recover(resumed.recovered(()))
    core.submit(request("new", 5, max_tokens=4))
    while core.has_work:
        core.step()
    for name in [*names, "new"]:
        core.delivered(name)
    core.step()
    saved = core._snapshots.undelivered.saved()
    writer.close()
    assert not saved.begins and not saved.answers


def test_a_log_without_a_record_says_so(tmp_path):
    begin_log(tmp_path)
    for resume in (Resume(), WHOLE):
        with pytest.raises(CorruptLog, match="no record yet"):
            read_resume_state(tmp_path, resume)
