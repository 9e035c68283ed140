"""Compiles grammars on worker threads. Each grammar is compiled once, within a time limit.

Python cannot stop a thread. If a compilation exceeds the time limit, its thread is abandoned: the grammar
counts as failed, and a new thread takes over. If the abandoned thread finishes later, its grammar becomes
usable. While MAX_ABANDONED threads are abandoned, no new grammar is accepted. Clients with hanging grammars
can therefore not occupy the whole machine.
"""

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from mmengine.errors import MMEngineError, in_one_line
from mmengine.request import GrammarRequest
from mmengine.structured_output.deep_stack import start_deep
from mmengine.structured_output.engines.base import Compiled

WORKERS = 2
# Maximum number of cached grammars. A schema takes three entries: the grammar and two draft grammars.
CACHE_SIZE = 384
MAX_ABANDONED = 4  # With this many hanging compilations, no new grammar is accepted.
NOTHING = GrammarRequest("", "")


class Compilation:
    """The compilation of a grammar. Only Compiler changes an instance.

    When `is_done` becomes True, `compiled` or `error` is set, and `grammar` is dropped.
    """

    __slots__ = ("grammar", "key", "compiled", "error", "is_done", "started_at", "users")

    def __init__(self, grammar: GrammarRequest, key: bytes):
        self.grammar, self.key = grammar, key
        self.compiled: Compiled | None = None
        self.error = ""
        self.is_done = False
        self.started_at = 0.0  # When a worker started the compilation.
        self.users = 1

    def settle(self, compiled: Compiled | None, error: str) -> None:
        self.compiled, self.error, self.is_done = compiled, error, True
        self.grammar = NOTHING


class Compiler:
    """Compiles grammars on worker threads, which are started when needed.

    `compile` compiles a grammar or raises an error. `deadline_s` is the time limit for a compilation. `clock`
    returns the time in seconds.
    """

    def __init__(
        self,
        compile: Callable[[GrammarRequest], Compiled],
        *,
        deadline_s: float,
        workers: int = WORKERS,
        cache_size: int = CACHE_SIZE,
        max_abandoned: int = MAX_ABANDONED,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._compile, self._deadline_s = compile, deadline_s
        self._num_workers, self._cache_size, self._max_abandoned = workers, cache_size, max_abandoned
        self._clock = clock
        self._changed = threading.Condition()  # Guards all attributes that follow.
        self._known: OrderedDict[bytes, Compilation] = OrderedDict()
        self._queue: deque[Compilation] = deque()
        # Worker thread -> its compilation, or None while the thread is idle.
        self._running: dict[threading.Thread, Compilation | None] = {}
        self._abandoned: set[threading.Thread] = set()
        self._closed = False

    def get(self, grammar: GrammarRequest) -> Compilation:
        """Return the compilation of `grammar`, and queue it if the grammar is new.

        The caller counts as a user of the compilation until `release`. Raises MMEngineError if no new grammar
        is accepted.
        """
        if grammar.field_confidence:  # field_confidence does not change the grammar.
            grammar = msgspec.structs.replace(grammar, field_confidence=False)
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        with self._changed:
            self._abandon_late()
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                known.users += 1
                return known
            if self._is_stuck:
                raise MMEngineError(f"no new grammars: {self._stuck_text}")
            made = self._known[key] = Compilation(grammar, key)
            self._queue.append(made)
            self._begin_workers()
            self._changed.notify_all()
        return made

    def release(self, compilation: Compilation) -> None:
        """Remove a user. A compilation without users is dropped if no worker has started it."""
        with self._changed:
            compilation.users -= 1
            if not compilation.users and compilation in self._queue:
                self._queue.remove(compilation)
                del self._known[compilation.key]

    def check(self) -> None:
        """Abandon compilations that exceed the time limit.

        Call this regularly while a compilation is awaited.
        """
        with self._changed:
            self._abandon_late()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until a compilation is done."""
        with self._changed:
            self._changed.wait(seconds)
            self._abandon_late()

    @property
    def reasons(self) -> list[str]:
        """The reasons why no new grammars are accepted; empty if new grammars are accepted."""
        with self._changed:
            return [self._stuck_text] if self._is_stuck else []

    def close(self) -> None:
        """Stop accepting grammars. Running compilations are not interrupted."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    @property
    def _is_stuck(self) -> bool:
        return len(self._abandoned) >= self._max_abandoned

    @property
    def _stuck_text(self) -> str:
        return (
            f"{len(self._abandoned)} grammars have been compiling for more than {self._deadline_s:g} seconds "
            "(grammar_timeout_s) each; restart the engine"
        )

    def _begin_workers(self) -> None:
        idle = sum(compilation is None for compilation in self._running.values())
        while idle < len(self._queue) and len(self._running) < self._num_workers and not self._is_stuck:
            thread = threading.Thread(target=self._work, name="mmengine-grammar", daemon=True)
            self._running[thread] = None
            start_deep(thread)
            idle += 1

    def _abandon_late(self) -> None:
        now = self._clock()
        for thread, compilation in list(self._running.items()):
            if compilation is None or now - compilation.started_at <= self._deadline_s:
                continue
            del self._running[thread]
            self._abandoned.add(thread)
            compilation.settle(
                None, f"the grammar was not compiled within {self._deadline_s:g} seconds (grammar_timeout_s)"
            )
        if self._is_stuck:
            for compilation in self._queue:
                compilation.settle(None, f"the grammar was not compiled: {self._stuck_text}")
                del self._known[compilation.key]
            self._queue.clear()
        self._begin_workers()

    def _work(self) -> None:
        thread = threading.current_thread()
        while (compilation := self._take(thread)) is not None:
            try:
                compiled, error = self._compile(compilation.grammar), ""
            except MMEngineError as refusal:
                compiled, error = None, str(refusal)
            # A panic in Rust code arrives as a BaseException. Only the current grammar fails.
            except BaseException as failure:
                compiled, error = None, f"the grammar was not compiled: {_describe_failure(failure)}"
            with self._changed:
                compilation.settle(compiled, error)
                if thread in self._abandoned:
                    self._abandoned.discard(thread)
                    self._begin_workers()
                    return
                self._running[thread] = None
                self._forget_old()
                self._changed.notify_all()

    def _take(self, thread: threading.Thread) -> Compilation | None:
        """Wait for the next compilation and return it, or None when the compiler is closed."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if self._closed:
                del self._running[thread]
                return None
            compilation = self._running[thread] = self._queue.popleft()
            compilation.started_at = self._clock()
            return compilation

    def _forget_old(self) -> None:
        done = [key for key, compilation in self._known.items() if compilation.is_done]
        for key in done[: max(0, len(done) - self._cache_size)]:
            del self._known[key]


def _describe_failure(failure: BaseException) -> str:
    if isinstance(failure, RecursionError):
        return "nested too deeply"
    if isinstance(failure, MemoryError):
        return "not enough memory; reduce the size of the grammar"
    return f"the grammar engine failed ({in_one_line(failure, 100)}); write the grammar differently"
