"""Background responses and batches survive the loss of a fleet's ingress and replicas."""

import asyncio
import time

import pytest

from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.errors import KeepFailed, LogError, QueueFull
from mmengine.events import lock as locks
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.segment import segment_name
from mmengine.fleet import durable_requests as kept_requests
from mmengine.fleet import ledger as ledgers
from mmengine.fleet.attempt import ReplicaLost, RoutingLimits
from mmengine.fleet.durable_requests import INGRESS, NOT_ADOPTED, REQUESTS, open_durable_requests
from mmengine.fleet.ledger import Ledger, LedgerEntry
from mmengine.fleet.replica_logs import ReplicaLogs
from mmengine.fleet.wire import Accepted, ReplicaName, ReplicaRequest, encode, wire_prompt
from mmengine.request import SamplingParams
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.reasoning import NO_REASONING
from tests.events.logs import begin_log, column, write_log
from tests.fleet.durable_fleets import CONFIG, Leaving, all_at_once, fleet, killed
from tests.server.batching import begun as begun_batch
from tests.server.batching import client_of, ended, line, lines_in
from tests.server.running import wait_for
from tests.server.test_server_responses_kept import PATH, TEXT, begun, events, look, text_of
from tests.server.test_server_responses_kept import ended as response_ended


def tokens_given(root):
    """Return for each replica how many answer tokens its requests already had when they arrived."""
    found = {}
    for log in root.iterdir():
        if log.name != INGRESS:
            queued = [each.event for each in LogReader(log) if isinstance(each.event, ev.Queued)]
            found[log.name] = sum(len(each.outputs) // 4 for each in queued)
    return found


def requests_in(root):
    return list((root / INGRESS / REQUESTS).glob("*.request"))


def test_everything_resumes_after_a_kill_of_ingress_and_replicas(tmp_path):
    rows = [("b" * (5 + 9 * n), f"{n}") for n in range(12)]
    with fleet(tmp_path / "logs", "ab") as one:
        client = client_of(one)
        done, half = begun(one, input="short"), begun(one)
        response_ended(one, done)
        batch = begun_batch(client, [line(name, text, n=1 + int(name) % 2) for text, name in rows])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3)
        wait_for(lambda: num_said(one, half) > 20)
        root = killed(tmp_path / "logs", tmp_path / "again")
        whole = events(one, half)
        wait_for(lambda: text_of(look(one, half)[2]) == TEXT.upper())
        client.close()
    with fleet(root, "cd") as one:
        client = client_of(one)
        # The replica's log has the answer; the ingress may have died before it stored the answer.
        assert text_of(response_ended(one, done)) == "SHORT"
        assert events(one, half) == whole, "the same events, from the first on"
        assert text_of(response_ended(one, half)) == TEXT.upper()
        found = ended(client, batch)
        assert found.status == "completed" and found.request_counts.completed == 12
        answers = {
            each["custom_id"]: each["response"]["body"] for each in lines_in(client, found.output_file_id)
        }
        assert len(answers) == 12
        for text, name in rows:
            said = [each["message"]["content"] for each in answers[name]["choices"]]
            assert said == [text.upper()] * (1 + int(name) % 2)
        wait_for(lambda: not requests_in(root))
        client.close()
    given = tokens_given(root)
    assert given["a"] == given["b"] == 0 and given["c"] + given["d"] > 20, "half answers went on"


def num_said(server, name):
    """Return how many tokens the ingress has for a running response."""
    journeys = list(server.engine._routed.values())
    return sum(each.num_tokens for each in journeys if f"resp_{each._request.request_id}" == name)


def test_a_lost_replica_s_requests_move_when_its_log_is_free(tmp_path):
    """The cut-off replica keeps running and holds its lock, so other replicas wait until its log is free."""
    root = tmp_path / "logs"
    with fleet(root, "ab") as one:
        name = begun(one)
        wait_for(lambda: num_said(one, name) > 20)
        (victim,) = (each.name for each in one.carrier.kept if each.load().num_open)
        one.loop.call_soon_threadsafe(one.carrier.lose, victim)
        assert text_of(response_ended(one, name)) == TEXT.upper()
        wait_for(lambda: not requests_in(root))
    assert sum(tokens_given(root).values()) > 20


def test_a_log_without_the_request_does_not_block_its_continuation(tmp_path):
    """A live replica may still log the request, so the continuation waits until the log is closed."""

    async def heard():
        alive = LogWriter(tmp_path / "a")
        begin_log(tmp_path / "a")
        lives = ReplicaLogs(tmp_path, ["r"])
        waiting = asyncio.ensure_future(lives.answers(["r"]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        alive.close()
        assert await waiting == [{}]

    asyncio.run(heard())


def test_unreadable_logs_do_not_block_a_continuation(tmp_path):
    """The first log is from another version, the second is a symbolic link, and the third is readable."""
    settings = CONFIG.as_dict()
    for name, config in (("a", {"of_another_version": 1}), ("b", settings), ("c", settings)):
        started = ev.Started(1, "9.0", DECISION_VERSION, config, {}, CONFIG.num_blocks)
        queued = ev.Queued("r", column(1, 2), SamplingParams(seed=1))
        write_log(tmp_path / name, [started, queued])
    segment = tmp_path / "b" / segment_name(0)
    segment.symlink_to(segment.rename(tmp_path / "elsewhere"))
    found = asyncio.run(ReplicaLogs(tmp_path, ["r"]).answers(["r"]))
    assert [list(each) for each in found] == [[], [], ["r"]]


class Stuck(Leaving):
    """Blocks in step 20 until the test ends."""

    may_end = False

    def collect(self):
        while self._steps >= 20 and not Stuck.may_end:
            time.sleep(0.01)
        return super().collect()


def test_a_frozen_replica_s_requests_do_not_move(tmp_path, caplog):
    """The fleet waits for the frozen replica, and logs a warning."""
    Stuck.may_end, patience = False, RoutingLimits(silence_s=5.0, patience_s=0.1)
    with fleet(tmp_path / "logs", "ab", Stuck, patience=patience) as one:
        name = begun(one)
        wait_for(lambda: any(each.engine.stats().steps >= 20 for each in one.carrier.kept))
        (victim,) = (each.name for each in one.carrier.kept if each.load().num_open)
        one.loop.call_soon_threadsafe(one.carrier.lose, victim)
        try:
            wait_for(lambda: "makes no progress" in caplog.text)
            assert look(one, name)[2]["status"] == "in_progress" and len(one.carrier.calls) == 1
            assert one.engine.readiness().ready
        finally:
            Stuck.may_end = True
        assert text_of(response_ended(one, name)) == TEXT.upper()
        assert len(one.carrier.calls) == 2
        wait_for(lambda: not requests_in(tmp_path / "logs"))


async def dies(key, data):
    yield encode(ReplicaName("nobody"))
    raise ReplicaLost("it died")


def test_a_request_that_kills_every_replica_has_an_error_as_answer(tmp_path):
    with fleet(tmp_path / "logs", "a") as one:
        name = begun(one)
        wait_for(lambda: num_said(one, name) > 5)
        one.carrier.call = dies
        one.loop.call_soon_threadsafe(one.carrier.lose, "a")
        assert response_ended(one, name)["status"] == "failed"
        wait_for(lambda: not requests_in(tmp_path / "logs"))
        assert look(one, name)[2]["status"] == "failed"


def test_cancelled_and_deleted_responses_stay_so_after_a_kill(tmp_path):
    with fleet(tmp_path / "logs", "a") as one:
        cancelled, deleted = begun(one), begun(one)
        assert one.call(f"{PATH}/{cancelled}/cancel", {})[2]["status"] == "cancelled"
        assert one.call(f"{PATH}/{deleted}", method="DELETE")[0] == 200
        assert not requests_in(tmp_path / "logs")
        root = killed(tmp_path / "logs", tmp_path / "again")
    with fleet(root, "b") as one:
        assert look(one, cancelled)[2]["status"] == "cancelled" and look(one, deleted)[0] == 404


def test_an_ingress_that_ends_leaves_what_is_kept_and_says_so(tmp_path):
    """The background request stays in the folder, and the next ingress continues it."""
    root = tmp_path / "logs"
    with fleet(root, "a", drain_s=0) as one:
        name = begun(one)
        wait_for(lambda: num_said(one, name) > 5)
    assert len(requests_in(root)) == 1
    with fleet(root, "b") as one:
        assert text_of(response_ended(one, name)) == TEXT.upper()
        status, _, again = one.call(PATH, {"input": "hi", "request_id": "mine"})
        assert status == 200 and one.call(PATH, {"input": "hi", "request_id": "mine"})[2] == again


def test_only_one_of_two_ingresses_gets_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_requests, "OWNER_WAIT_S", 0.1)
    found = all_at_once(*[lambda: open_durable_requests(tmp_path, 1.0, print)] * 2)
    (kept,) = (each for each in found if isinstance(each, kept_requests.DurableRequests))
    (refused,) = (each for each in found if each is not kept)
    assert isinstance(refused, LogError) and "another ingress keeps its requests" in str(refused)
    kept.close()
    open_durable_requests(tmp_path, 1.0, print).close()


def both_may(fd):
    """Lock nothing, like a file system whose locks do not work."""


def nobody_may(fd):
    raise OSError(37, "No locks available")


@pytest.mark.parametrize(
    ("take", "why"), [(both_may, "two processes could lock"), (nobody_may, "No locks available")]
)
def test_without_working_locks_nothing_is_kept(tmp_path, monkeypatch, take, why):
    said = []
    monkeypatch.setattr(locks, "_take", take)
    kept = open_durable_requests(tmp_path, 1.0, said.append)
    monkeypatch.undo()
    assert kept is None and len(said) == 1 and said[0].startswith(NOT_ADOPTED) and why in said[0]
    assert [path.name for path in (tmp_path / INGRESS).iterdir()] == []


def test_without_a_folder_background_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fleet.durable_fleets.open_durable_requests", lambda *given: None)
    with fleet(tmp_path / "logs", "a") as one:
        status, _, found = one.call(PATH, {"input": "hi", "background": True})
        assert status == 400 and "need a log" in found["error"]["message"]
        assert one.call("/v1/batches")[0] == one.call("/v1/files")[0] == 404
        assert one.call(PATH, {"input": "hi"})[0] == 200


def kept_of(name, text="hi"):
    ask = ReplicaRequest(name, wire_prompt(Prompt(text=text)), SamplingParams(seed=1), {"envelope": b"e"})
    return LedgerEntry(ask, Accepted(NO_REASONING, None, {}, 2))


def test_a_ledger_is_bounded_and_forgives_what_it_cannot_read(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, max_bytes=1000)
    ledger.put(kept_of("a"))
    ledger.put(kept_of("b"))
    with pytest.raises(QueueFull, match="more than 1,000 bytes"):
        ledger.put(kept_of("large", "x" * 1000))
    with pytest.raises(LogError, match="another process"):
        Ledger(tmp_path)
    ledger.drop("b")
    ledger.drop("unknown")

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledgers, "write_whole", full)
    with pytest.raises(KeepFailed, match="No space left"):
        ledger.put(kept_of("c"))
    monkeypatch.undo()
    assert "a" in ledger and "c" not in ledger
    ledger.close()
    ledger.drop("a")
    with pytest.raises(LogError, match="is ending"):
        ledger.put(kept_of("d"))
    (tmp_path / "torn.request").write_bytes(b"torn")
    again = Ledger(tmp_path)
    assert [(each.request_id, each.envelope) for each in again.found.values()] == [("a", b"e")]
    again.close()
