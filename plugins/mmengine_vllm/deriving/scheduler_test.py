"""Writes a pytest file that runs requests on vLLM's scheduler alone. The file does not import mmengine."""

import ast
import inspect
import re
from types import ModuleType
from typing import NamedTuple

import numpy as np

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.hosted.outcome import Outcome
from mmengine_vllm.deriving import scheduler_alone, served_requests
from mmengine_vllm.deriving.own_scheduler import OWN, adapter_of, image_of, scheduler_class
from mmengine_vllm.deriving.served_script import ServedScript, answers_of
from mmengine_vllm.deriving.settings import settings_of
from mmengine_vllm.vllm_object import VllmObject

_START = """
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
"""
_TEST = '''

def scheduler_class():
    """Return the class that SCHEDULER_CLASS names (MODULE:CLASS), or vLLM's own."""
    own = "async_scheduler:AsyncScheduler" if SETTINGS["async_scheduling"] else "scheduler:Scheduler"
    name = os.environ.get("SCHEDULER_CLASS") or f"vllm.v1.core.sched.{own}"
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def test_{name}():
    fault = fault_of(scheduler_class(), SETTINGS, REQUESTS, EVENTS, ANSWERS, CHECK)
    assert fault is None, fault
'''


class Expected(NamedTuple):
    """What the written test checks. `kind`: the fault to look for (see `check` in served_requests.fault_of).
    Only "decision" sets the other fields: the call's number, a field in the call's outcome, and the correct
    outcome.
    """

    kind: str
    call: int = 0
    field: str = ""
    outcome: Outcome | None = None


def module_of(served: ServedScript, expected: Expected) -> str:
    """Return the test file's text without its docstring."""
    script, config = served.script, served.script.config
    settings = settings_of(config, served.started.fingerprints)
    adapters: dict[str, int] = {}
    requests = {event.request_id: _request(event, adapters) for event in script.requests}
    events = [(each.step, *happened) for each in script.observations if (happened := _happened(each.event))]
    check: tuple[VllmObject, ...] = (expected.kind,)
    if expected.kind == "decision":
        value = getattr(expected.outcome, expected.field)
        if expected.field == "preempted":
            value = sorted(value)
        elif expected.field == "evicted":
            value = [key.hex() for key in value]
        check = ("decision", expected.call, expected.field, value)
    name = expected.field or expected.kind
    data = [
        f"SETTINGS = {_literal(settings)}",
        f"# The arguments of make_request for each request.\nREQUESTS = {_literal(requests)}",
        f"# (step, what happens before its call, argument)\nEVENTS = {_literal(events)}",
        f"# (tokens, end, {{place: (tokens of the step, its drafts)}}) for each request.\n"
        f"ANSWERS = {_literal(answers_of(script))}",
        f"CHECK = {_literal(check)}",
    ]
    return _library() + "\n\n" + "\n".join(data) + "\n" + _TEST.replace("{name}", name)


def refuse_other_outcome(module: str, name: str, *, own: str) -> None:
    """Run the test in the text `module`. Raises LogError if the test passes on the class `name`. If `own` is
    not "", also raises LogError if the test fails on vLLM's own class.
    """
    space: dict[str, VllmObject] = {"__name__": "minimized"}
    exec(compile(module, "the written test", "exec"), space)  # this module wrote the text

    def fault(name: str) -> str | None:
        is_async = space["SETTINGS"]["async_scheduling"]
        cls = scheduler_class(name, is_async=is_async)
        found: str | None = space["fault_of"](
            cls, *(space[each] for each in ("SETTINGS", "REQUESTS", "EVENTS", "ANSWERS", "CHECK"))
        )
        return found

    if fault(name) is None:
        raise LogError(f"the written test does not fail on {name}")
    if own and (found := fault(OWN)) is not None:
        raise LogError(f"the written test fails on vLLM's own scheduler, too: {found}")


def _library() -> str:
    """Return the code of scheduler_alone and served_requests, with their imports first."""
    imports, parts = {"import os", "from importlib import import_module"}, []
    for module in (scheduler_alone, served_requests):
        found, text = _split(module)
        imports |= found
        parts.append(text.strip("\n"))
    plain = sorted(line for line in imports if line.startswith("import "))
    others = sorted(line for line in imports if not line.startswith("import "))
    return "\n".join(["", *plain, *others]).lstrip() + "\n" + _START + "\n" + "\n\n\n".join(parts)


def _split(module: ModuleType) -> tuple[set[str], str]:
    """Return a module's import statements, except imports from mmengine, and the text below all imports."""
    text = inspect.getsource(module)
    tree, imports, end = ast.parse(text), set[str](), 0
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            end = node.end_lineno or end
            if "mmengine" not in ast.unparse(node):
                imports.add(ast.unparse(node))
    return imports, "\n".join(text.splitlines()[end:])


def _request(event: ev.Queued, adapters: dict[str, int]) -> dict[str, VllmObject]:
    """Return the arguments of make_request that differ from its defaults."""
    found: dict[str, VllmObject] = {
        "prompt": np.frombuffer(event.prompt, np.int32).tolist(),
        "max_tokens": max(1, event.sampling.max_tokens),
    }
    others = {
        "images": [image_of(item) for item in event.media],
        "lora": adapter_of(event, adapters),
        "grammar": event.grammar is not None,
        "priority": event.priority,
        "cache_salt": event.cache_salt,
    }
    return found | {name: value for name, value in others.items() if value}


def _happened(event: ev.Event) -> tuple[str, VllmObject] | None:
    match event:
        case ev.Queued(request_id=name):
            return "add", name
        case ev.Cancelled(request_id=name):
            return "abort", name
        case ev.GrammarReady(request_id=name):
            return "grammar", name
        case ev.CacheReset(preempt_running=preempts):
            return "reset", preempts
    return None


def _literal(value: VllmObject, depth: int = 0) -> str:
    """Return a Python expression for a plain value. Long lists of tokens become ranges."""
    if isinstance(value, list) and len(value) > 8 and all(type(each) is int for each in value):
        return _tokens(value)
    space = "    " * (depth + 1)
    if isinstance(value, dict) and value and depth < 2:
        lines = [f"{space}{key!r}: {_literal(each, depth + 1)},\n" for key, each in value.items()]
        return "{\n" + "".join(lines) + "    " * depth + "}"
    if isinstance(value, list) and value and depth < 1:
        return "[\n" + "".join(f"{space}{_literal(each, depth + 1)},\n" for each in value) + "]"
    if isinstance(value, tuple):
        parts = [_literal(each, max(depth, 2)) for each in value]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(_literal(each, max(depth, 2)) for each in value)}]"
    return repr(value)


def _tokens(tokens: list[int]) -> str:
    """Return an expression for a list. Runs of consecutive or equal tokens become a `range` or a product."""
    array = np.array(tokens)
    steps, parts, place = np.diff(array), list[str](), 0
    while place < len(tokens):
        step = int(steps[place]) if place < len(steps) else 0
        same = steps[place:] == step
        length = 1 + int(len(same) if same.all() else same.argmin())
        if step not in (0, 1) or length < 4:
            parts.append(str(tokens[place]))
            place += 1
            continue
        first = tokens[place]
        parts.append(f"*[{first}] * {length}" if step == 0 else f"*range({first}, {first + length})")
        place += length
    return re.sub(r" +", " ", f"[{', '.join(parts)}]")
