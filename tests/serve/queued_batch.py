"""Generates answers to prompts that are all queued before the first step."""

from collections.abc import Iterable

from mmengine.serve.batch.run_batch import Job
from mmengine.serve.engine.engine import Engine
from mmengine.serve.text.request_output import Completion


def answers_at_once(engine: Engine, jobs: Iterable[Job]) -> dict[int, Completion]:
    """Return answers by job index. All prompts are prepared and all grammars compiled before the first step.
    So the batches are reproducible, unlike the batches in `run_batch`.
    """
    places, grammars = {}, engine.built.grammars
    for index, (prompt, options) in enumerate(jobs):
        prepared = prompt.prepare(engine.processor, options)
        name = engine.submit_prepared(prepared, options, stream=False)
        places[name] = index
        if options.grammar is not None:
            grammars.error_of(name)
    found = {}
    while not engine.is_idle:
        for output in engine.step():
            if output.completion is not None:
                found[places[output.request_id]] = output.completion
    return found
