"""Keeps the grammars of live requests. The engine adds grammars, and the executor reads compiled grammars."""

from collections.abc import Callable

from mmengine.errors import MMEngineError
from mmengine.request import GrammarRequest, Request
from mmengine.structured_output.closing.closer import Closer
from mmengine.structured_output.engines.base import Backend, Compiled
from mmengine.structured_output.matcher import Matcher
from mmengine.structured_output.request.spec import draft_grammars_of
from mmengine.structured_output.rows.compiler import Compilation, Compiler


class Grammars:
    """The grammars of live requests by request id. A single thread must call all methods.

    Tests pass a `compile` function that replaces the backend's.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        deadline_s: float,
        compile: Callable[[GrammarRequest], Compiled] | None = None,
    ):
        self.backend = backend
        self._compiler = Compiler(compile or backend.compile, deadline_s=deadline_s)
        self._held: dict[str, Compilation] = {}
        self._awaited: dict[str, Compilation] = {}  # Compilations that `settled` has not reported yet.
        self._draft_grammars: dict[str, list[Compilation]] = {}
        self._budgets: dict[str, tuple[int, int]] = {}  # Request id -> (token budget, reserve).
        self._closers: dict[str, Closer] = {}

    def hold(self, request_id: str, grammar: GrammarRequest, budget: int, reserve: int = 0) -> None:
        """Compile `grammar` for a request, and hold it until `release`.

        The answer may have `budget` tokens. `reserve` has the same meaning as in Compiled.closer. Raises
        MMEngineError if no new grammar is accepted.
        """
        self._held[request_id] = self._awaited[request_id] = self._compiler.get(grammar)
        self._budgets[request_id] = budget, reserve

    def release(self, request_id: str) -> None:
        for compilation in (self._held.pop(request_id, None), *self._draft_grammars.pop(request_id, ())):
            if compilation is not None:
                self._compiler.release(compilation)
        self._awaited.pop(request_id, None)
        self._budgets.pop(request_id, None)
        self._closers.pop(request_id, None)

    def settled(self) -> list[tuple[str, str]]:
        """Return (request id, error) for grammars that finished since the last call.

        The error is "" if the grammar can be used.
        """
        if not self._awaited:
            return []
        self._compiler.check()
        done = [(name, each) for name, each in self._awaited.items() if each.is_done]
        for name, _ in done:
            del self._awaited[name]
        return [(name, self._error(name, each)) for name, each in done]

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until a grammar is compiled."""
        self._compiler.wait(seconds)

    def error_of(self, request_id: str) -> str:
        """Wait for a request's grammar. Returns why the grammar cannot be used, or ""."""
        held = self._held[request_id]
        while not held.is_done:
            self._compiler.wait(0.05)
        return self._error(request_id, held)

    def compiled(self, request_id: str) -> Compiled | None:
        """Return the request's compiled grammar, or None if it is not compiled or cannot be used."""
        held = self._held.get(request_id)
        return None if held is None else held.compiled

    def closer(self, request_id: str) -> Closer | None:
        """Return a new Closer for a request, at the beginning of its answer. A Closer completes an answer
        within its token budget. Returns None if completion is off.
        """
        compiled = self.compiled(request_id)
        made = None if compiled is None else compiled.closer(*self._budgets[request_id])
        if made is not None:
            # A preempted request had a closer in its earlier row. The new closer takes over `has_closed`.
            before = self._closers.get(request_id, made)
            made.has_closed = before.has_closed
            self._closers[request_id] = made
        return made

    def draft_grammars(self, request: Request) -> list[Callable[[], Matcher]] | None:
        """Return matcher factories for the request's draft grammars.

        A draft grammar allows fewer texts than the grammar but forces more tokens. Returns None while draft
        grammars are being compiled.
        """
        request_id = request.request_id
        held = self._held.get(request_id)
        if request.grammar is None or held is None or held.compiled is None:
            return []
        begun = self._draft_grammars.get(request_id)
        if begun is None:
            begun = self._draft_grammars[request_id] = self._begin_draft_grammars(request.grammar)
        if not all(each.is_done for each in begun):
            return None
        return [each.compiled.matcher for each in begun if each.compiled is not None]

    def _begin_draft_grammars(self, grammar: GrammarRequest) -> list[Compilation]:
        try:
            return [self._compiler.get(each) for each in draft_grammars_of(grammar)]
        except MMEngineError:  # No new grammars are accepted, so the request runs without draft grammars.
            return []

    def _error(self, request_id: str, done: Compilation) -> str:
        budget, _ = self._budgets[request_id]
        if done.compiled is None or done.compiled.shortest <= budget:
            return done.error
        return (
            f'on_truncation "close" is not possible: the shortest answer found needs '
            f"{done.compiled.shortest} tokens; the limit is {budget}: raise max_tokens or max_model_len"
        )

    @property
    def reasons(self) -> list[str]:
        """The reasons why new grammars are refused; empty if new grammars are accepted."""
        return self._compiler.reasons

    def close(self) -> None:
        self._compiler.close()
