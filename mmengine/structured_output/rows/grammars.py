"""The grammars of live requests, by request: the engine brings them, the executor finds them compiled."""

from collections.abc import Callable

from mmengine.errors import MMEngineError
from mmengine.request import GrammarRequest, Request
from mmengine.structured_output.closing.closer import Closer
from mmengine.structured_output.engines.base import Backend, Compiled
from mmengine.structured_output.matcher import Matcher
from mmengine.structured_output.request.spec import draft_grammars_of
from mmengine.structured_output.rows.compiler import Compilation, Compiler


class Grammars:
    """Called by one thread. `compile` takes the place of the backend's own in tests."""

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
        self._awaited: dict[str, Compilation] = {}  # nobody was told yet what became of them
        self._draft_grammars: dict[str, list[Compilation]] = {}
        self._budgets: dict[str, tuple[int, int]] = {}  # and what of it is kept
        self._closers: dict[str, Closer] = {}

    def hold(self, request_id: str, grammar: GrammarRequest, budget: int, reserve: int = 0) -> None:
        """A request, whose answer may have `budget` tokens, `reserve` as of Compiled.closer, needs `grammar`,
        until `release`. Raises MMEngineError where no new one is taken."""
        self._held[request_id] = self._awaited[request_id] = self._compiler.get(grammar)
        self._budgets[request_id] = budget, reserve

    def release(self, request_id: str) -> None:
        for compilation in (self._held.pop(request_id, None), *self._draft_grammars.pop(request_id, ())):
            if compilation is not None:
                self._compiler.let_go(compilation)
        self._awaited.pop(request_id, None)
        self._budgets.pop(request_id, None)
        self._closers.pop(request_id, None)

    def settled(self) -> list[tuple[str, str]]:
        """(request, why its grammar cannot be used) of those that are compiled, or will not be, since the
        last call; the reason is empty where it can."""
        if not self._awaited:
            return []
        self._compiler.check()
        done = [(name, each) for name, each in self._awaited.items() if each.is_done]
        for name, _ in done:
            del self._awaited[name]
        return [(name, self._error(name, each)) for name, each in done]

    def wait(self, seconds: float) -> None:
        """Until a grammar is compiled, at most so long."""
        self._compiler.wait(seconds)

    def error_of(self, request_id: str) -> str:
        """Wait for one request's grammar; why it cannot be used, or empty."""
        held = self._held[request_id]
        while not held.is_done:
            self._compiler.wait(0.05)
        return self._error(request_id, held)

    def compiled(self, request_id: str) -> Compiled | None:
        """None for a request that holds none that can be used."""
        held = self._held.get(request_id)
        return None if held is None else held.compiled

    def closer(self, request_id: str) -> Closer | None:
        """For the beginning of a request's answer; None for one that is not to be closed."""
        compiled = self.compiled(request_id)
        made = None if compiled is None else compiled.closer(*self._budgets[request_id])
        if made is not None:
            before = self._closers.get(request_id, made)  # of a row that it had, and lost
            made.has_closed = before.has_closed
            self._closers[request_id] = made
        return made

    def draft_grammars(self, request: Request) -> list[Callable[[], Matcher]] | None:
        """What makes matchers of grammars that allow some of what a request's own does, but force more of it.
        None while they are being compiled."""
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
        except MMEngineError:  # no new grammars are taken: so it goes without
            return []

    def _error(self, request_id: str, done: Compilation) -> str:
        budget, _ = self._budgets[request_id]
        if done.compiled is None or done.compiled.shortest <= budget:
            return done.error
        return (
            f'on_truncation "close" cannot be kept: the shortest answer that was found needs '
            f"{done.compiled.shortest} tokens, and it may have {budget}; raise max_tokens, or max_model_len"
        )

    @property
    def reasons(self) -> list[str]:
        """Why new grammars are refused."""
        return self._compiler.reasons

    def close(self) -> None:
        self._compiler.close()
