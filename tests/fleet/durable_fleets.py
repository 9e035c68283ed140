"""A server for a fleet with durable requests, which survive a kill of the server and of the replicas."""

import threading
from contextlib import contextmanager
from pathlib import Path

from mmengine.core.resume import Resume, read_resume_state
from mmengine.errors import LogError
from mmengine.events.lock import is_locked
from mmengine.fleet.attempt import RoutingLimits
from mmengine.fleet.durable_requests import INGRESS, REQUESTS, open_durable_requests
from mmengine.fleet.engine import FleetEngine
from mmengine.fleet.replica import Replica
from mmengine.fleet.wire import decode_request
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.prompt.prompt import core_ids
from mmengine.server.settings import ServerSettings
from tests.fleet.carriers import LocalCarrier
from tests.log_copies import copied
from tests.serve.serve_fakes import EchoProcessor, builder
from tests.server.running import NAMES, Served, SlowEcho

CONFIG = builder()(stop_watcher_factory=lambda tokenizer: None).config
PATIENCE = RoutingLimits(silence_s=5.0, patience_s=20.0)


class Leaving(SlowEcho):
    """An executor that can be closed while requests run. These requests stay unfinished in the log."""

    pause_s = 0.004

    def close(self):
        pass


def replica(root, name, executor_class=Leaving):
    engine = AsyncEngine(builder=builder(executor_class=executor_class), log=root / name)
    return Replica(name, engine, beat_s=0.05)


class Watched(LocalCarrier):
    """Records in `twice` each request that is sent to a second replica while another replica still runs the
    request.
    """

    def __init__(self, root, *replicas):
        super().__init__(*replicas)
        self._root, self.twice = root, []

    async def call(self, key, data):
        ask = decode_request(data)
        logs = [log for log in self._root.iterdir() if log.name != INGRESS]
        for name in core_ids(ask.request_id, ask.sampling.n):
            self.twice += [(name, log) for log in logs if is_locked(log) and _has(log, name)]
        async for word in super().call(key, data):
            yield word


def _has(log, core_id):
    try:
        found = read_resume_state(log, Resume()).answers.get(core_id)
    except LogError:
        return False
    return found is not None and not found.reason


class ServedFleet(Served):
    """A server for a fleet. Closing the server closes the carrier's replicas. `kept`: FleetEngine's argument
    `durable`.
    """

    def __init__(self, root, carrier, kept, patience, **settings):
        self.carrier, self._kept, self._patience = carrier, kept, patience
        self.settings = ServerSettings.of({"port": 0, **settings})
        storage = {"log": root / INGRESS} if kept is not None else None
        super().__init__(None, self.settings, NAMES, None, storage=storage)

    async def _serve(self):
        self.engine = FleetEngine(self.carrier, EchoProcessor(), CONFIG, 64, self._patience, self._kept)
        try:
            await super()._serve()
        finally:
            for each in getattr(self.carrier, "kept", ()):
                await each.engine.close(leave=True)


@contextmanager
def ingress(root, carrier, *, patience=PATIENCE, said=None, **settings):
    kept = open_durable_requests(root, patience.patience_s, (said if said is not None else []).append)
    one = ServedFleet(root, carrier, kept, patience, **settings)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def fleet(root, names, executor_class=Leaving, **options):
    """Start an ingress with new replicas."""
    root.mkdir(exist_ok=True)
    made = [replica(root, name, executor_class) for name in names]
    carrier = Watched(root, *made)
    carrier.kept = made
    with ingress(root, carrier, **options) as one:
        yield one
    assert not carrier.twice


def killed(root, target):
    """Copy the folders in the state that a kill of all processes would leave. The ingress's requests are
    copied first, because the ingress deletes a request only after the answer is stored elsewhere.
    """
    requests = Path(INGRESS, REQUESTS)
    owed = copied(root / requests, target.with_name(f"{target.name}, owed"))
    owed.rename(copied(root, target, REQUESTS) / requests)
    return target


def all_at_once(*calls):
    """Run the calls at the same time. Return each call's result or error."""
    found, start = [None] * len(calls), threading.Barrier(len(calls))

    def run(place, call):
        start.wait()
        try:
            found[place] = call()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
