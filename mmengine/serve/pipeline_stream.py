"""One answer for a streamer of transformers, token by token."""

from typing import Any, Protocol, runtime_checkable

from mmengine.errors import InvalidRequest
from mmengine.serve.answers import Completion
from mmengine.serve.engine import Engine
from mmengine.serve.options import Options
from mmengine.serve.prompts import Prompt


@runtime_checkable
class Streamer(Protocol):
    """transformers' BaseStreamer: gets the prompt's tokens, int64 [1, n], and each of the answer, [1]."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


def as_streamer(given: object, options: Options) -> Streamer | None:
    """Raises InvalidRequest for what cannot stream, or cannot stream so many answers."""
    if given is None:
        return None
    if not isinstance(given, Streamer):
        raise InvalidRequest(
            f"a streamer has the methods put and end, which a {type(given).__name__} has not"
        )
    if options.sampling.n != 1:
        raise InvalidRequest("a streamer takes one answer; leave out num_return_sequences, or the streamer")
    return given


def stream_answer(engine: Engine, prompt: Prompt, options: Options, streamer: Streamer) -> Completion:
    """The answer, of which `streamer` hears while it is computed; what that raises cancels it. Answers of
    batches that are under way are kept for them. Raises InvalidRequest, InvalidMedia, QueueFull."""
    import torch  # lazy: an engine with torch has it loaded already

    engine.check_batchable()
    prepared = prompt.prepare(engine.processor, options.cache_salt)
    request_id = engine.submit_prepared(prepared, options)
    try:
        streamer.put(torch.tensor(prepared.prompt_token_ids.tolist())[None])
        while True:
            for output in engine.step():
                if output.request_id != request_id:
                    if output.completion is not None:
                        engine.batch_done[output.request_id] = output.completion
                    continue
                for token_id in output.token_ids:
                    streamer.put(torch.tensor([token_id]))
                if output.completion is not None:
                    streamer.end()
                    return output.completion
            engine.check_stall()
    except BaseException:
        _give_up(engine, request_id)
        raise


def _give_up(engine: Engine, request_id: str) -> None:
    """Until it is gone nothing else could be answered."""
    engine.cancel(request_id)
    while engine.has_work and any(engine.requests.core_ids(request_id)):
        for output in engine.step():
            if output.completion is not None and output.request_id != request_id:
                engine.batch_done[output.request_id] = output.completion
