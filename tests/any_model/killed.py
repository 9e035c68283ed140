"""Runs requests in a process that is killed, and finishes them in another engine from the log."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from mmengine.core.resume import Resume
from mmengine.serve.engine.engine import Engine
from tests.forked import exit_code_of

MakeEngine = Callable[[Resume | None], Engine]


def tokens_after_a_kill(make_engine: MakeEngine, chats: Sequence, num_new: int, call: int) -> list[list[int]]:
    """Return each chat's greedy tokens. A child process is killed at dispatch number `call`, and an engine in
    this process continues the log.
    """
    assert exit_code_of(partial(_begin, make_engine, chats, num_new, call)) == -signal.SIGKILL
    with make_engine(Resume()) as engine:
        names, found = list(engine.requests.resumed), {}
        assert len(names) == len(chats), "not every request is in the log"
        for name in names:
            done = engine.requests.resume(name, 1, stream=False)
            found |= {name: done} if done is not None else {}
        while engine.has_work:
            found |= {out.request_id: out.completion for out in engine.step() if out.completion}
    return [list(found[str(place)].choices[0].token_ids) for place in range(len(chats))]


def _begin(make_engine: MakeEngine, chats: Sequence, num_new: int, call: int) -> int:
    engine = make_engine(None)
    _die_at(engine, call)
    for place, chat in enumerate(chats):
        options = {"max_tokens": num_new, "ignore_eos": True, "temperature": 0.0}
        engine.submit(chat, request_id=str(place), **options)
    while engine.has_work:
        engine.step()
    return 0


def _die_at(engine: Engine, call: int) -> None:
    """Kill this process at the executor's dispatch number `call`, counted from 0."""
    executor = engine.built.executor
    dispatch, calls = executor.dispatch, iter(range(call))

    def dispatched(plan: object) -> None:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        dispatch(plan)

    executor.dispatch = dispatched
