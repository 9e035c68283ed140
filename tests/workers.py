"""Runs the tests in forked processes: `pytest --workers N`.

Tests are imported and collected once, before the workers are forked. pytest-xdist would collect them in each
worker, which costs half a minute of CPU time per worker. A worker runs module after module, so that a
module's fixtures are made once. If no module is left, the worker takes tests from the module with the most
tests left.
"""

import multiprocessing
import warnings
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait

import pytest

FORK = multiprocessing.get_context("fork")


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, help="Number of worker processes (default 0: none).")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    option = session.config.option
    if not option.workers or option.collectonly or len(session.items) < 2:
        return None
    if session.testsfailed and not option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    Pool(session).run(option.workers)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class Queue:
    """The tests that no worker has yet, as indexes into `session.items`.

    A unit is a list of tests for a single worker. A module is a list of units.
    """

    def __init__(self, modules: Iterable[Iterable[list[int]]]):
        self._waiting = deque(deque(units) for units in modules)
        self._running: dict[object, deque[list[int]]] = {}

    def next_unit(self, worker: object) -> list[int]:
        """Return the next tests of the worker's module. If the module has none left, take a new module. If no
        new module is left, take from the module with the most units left. The list is empty at the end.
        """
        if not self._running.get(worker) and self._waiting:
            self._running[worker] = self._waiting.popleft()
        if self._running.get(worker):
            return self._running[worker].popleft()
        longest = max(self._running.values(), key=len, default=None)
        return longest.pop() if longest else []

    def put_back(self, tests: list[int]) -> None:
        if tests:
            self._waiting.appendleft(deque([tests]))


def queue_of(items) -> Queue:
    """Return the queue of these tests. Tests with the same `together` attribute form a unit, even across
    modules. Modules with the largest units come first, because they take longest.
    """
    modules: dict[str, dict[str, list[int]]] = {}
    for index, item in enumerate(items):
        unit = getattr(item, "together", None)
        units = modules.setdefault(unit or item.nodeid.partition("::")[0], {})
        units.setdefault(unit or item.nodeid, []).append(index)
    ordered = sorted(modules.values(), key=lambda units: -max(map(len, units.values())))
    return Queue(units.values() for units in ordered)


class Worker:
    """The parent's handle of a worker process. `tests`: indexes of its unfinished tests."""

    def __init__(self, session, number: int):
        self.tests: deque[int] = deque()
        self.pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_work, args=(session, theirs, self.pipe, number))
        self._process.start()
        theirs.close()

    def end(self, *, is_cut_off: bool = False) -> int:
        """Wait until the process ends, and return its exit code. `is_cut_off`: terminate it first."""
        if is_cut_off:
            self._process.terminate()
        self._process.join()
        self.pipe.close()
        return self._process.exitcode


class Pool:
    """Gives tests to workers and passes their reports on to pytest."""

    def __init__(self, session):
        self._session, self._queue, self._started = session, queue_of(session.items), 0
        self._workers: dict[Connection, Worker] = {}
        session.config._tmp_path_factory.getbasetemp()  # Creates the parent of the workers' folders.

    def run(self, count: int) -> None:
        try:
            for _ in range(count):
                self._start()
            while self._workers:
                for pipe in wait(list(self._workers)):
                    self._receive(self._workers[pipe])
        finally:
            for worker in self._workers.values():
                worker.end(is_cut_off=True)

    def _start(self) -> None:
        worker = Worker(self._session, self._started)
        self._started += 1
        self._workers[worker.pipe] = worker

    def _receive(self, worker: Worker) -> None:
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            self._ended(worker)
            return
        config = self._session.config
        if kind == "next":
            is_over = self._session.shouldfail or self._session.shouldstop
            tests = [] if is_over else self._queue.next_unit(worker)
            worker.tests.extend(tests)
            worker.pipe.send(tests)
        elif kind == "report":
            report = config.hook.pytest_report_from_serializable(config=config, data=value)
            config.hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            config.hook.pytest_warning_recorded.call_historic(kwargs=value)
        else:
            self._finished(worker.tests.popleft())

    def _finished(self, test: int) -> None:
        item = self._session.items[test]
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, worker: Worker) -> None:
        """Report the test that ended its worker as failed, and start another worker. The ended worker's other
        tests return to the queue.
        """
        del self._workers[worker.pipe]
        code = worker.end()
        if not worker.tests:
            if code:
                raise RuntimeError(f"a worker process ended outside of a test, with exit code {code}")
            return
        test = worker.tests.popleft()
        item = self._session.items[test]
        text = f"the worker process ended with exit code {code} (negative: a signal)"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        self._finished(test)
        self._queue.put_back(list(worker.tests))
        self._start()


def _work(session, pipe: Connection, parents: Connection, number: int) -> None:
    """Run tests in a worker process until the parent has no more."""
    parents.close()
    plugins, option = session.config.pluginmanager, session.config.option
    option.maxfail = 0  # The parent counts the failures of all workers.
    plugins.unregister(name="terminalreporter")
    Reporter(session.config, pipe)
    # The inherited capture files would share their position among all processes.
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    folders = session.config._tmp_path_factory
    folders._basetemp = folders.getbasetemp() / f"worker{number}"
    folders._basetemp.mkdir()
    tests: deque[int] = deque()

    def has_more() -> bool:
        if not tests:
            pipe.send(("next", None))
            tests.extend(pipe.recv())
        return bool(tests)

    try:
        while has_more():
            item = session.items[tests.popleft()]
            following = session.items[tests[0]] if has_more() else None
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            pipe.send(("finished", None))
            if following is None:
                return
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # The parent reports the reason, or has ended.
        pass
    finally:
        capture.stop_global_capturing()


class Reporter:
    """Sends a worker's reports and warnings to the parent."""

    def __init__(self, config, pipe: Connection):
        self._config, self._pipe, self._is_registered = config, pipe, False
        # pytest repeats the parent's warnings for each new plugin. These repetitions are not sent.
        config.pluginmanager.register(self)
        self._is_registered = True

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        if not self._is_registered:
            return
        category, place = warning_message.category, (warning_message.filename, warning_message.lineno)
        # Send only the warning's text, because its objects may not be picklable.
        plain = warnings.WarningMessage(str(warning_message.message), category, *place)
        value = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warning", value))
