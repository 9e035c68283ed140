"""Passes an answer to a transformers streamer, token by token."""

from typing import Any, Protocol, runtime_checkable

from mmengine.errors import InvalidRequest
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.prompt_media import PromptMedia
from mmengine.serve.text.request_output import Completion


@runtime_checkable
class Streamer(Protocol):
    """The interface that transformers' BaseStreamer defines.

    `put` receives the prompt's tokens (int64 [1, n]), then each answer token ([1]).
    """

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


def as_streamer(given: object, options: Options) -> Streamer | None:
    """Return `given` after checking that it is a streamer.

    Raises InvalidRequest if `given` is no streamer, or if several answers are requested.
    """
    if given is None:
        return None
    if not isinstance(given, Streamer):
        raise InvalidRequest(
            f"a streamer must have the methods put and end, which {type(given).__name__} lacks"
        )
    if options.sampling.n != 1:
        raise InvalidRequest("a streamer takes one answer; leave out num_return_sequences, or the streamer")
    return given


def stream_answer(engine: Engine, prompt: Prompt, options: Options, streamer: Streamer) -> Completion:
    """Run a request, pass the answer's tokens to `streamer` as they are generated, and return the answer.

    An exception in the streamer cancels the request. Answers that other requests complete meanwhile are
    stored in `engine.batch_done`, for `run_batch`. Raises InvalidRequest, InvalidMedia, QueueFull.
    """
    import torch  # lazy: if the engine uses torch, torch is already loaded

    engine.check_batchable()
    with PromptMedia(prompt) as media:
        prepared = media.prompt().prepare(engine.processor, options)
    with engine.outputs_of(engine.submit_prepared(prepared, options)) as outputs:
        streamer.put(torch.tensor(prepared.prompt_token_ids.tolist())[None])
        for output in outputs:
            for token_id in output.token_ids:
                streamer.put(torch.tensor([token_id]))
            if output.completion is not None:
                streamer.end()
                return output.completion
    raise AssertionError("a request ends with its completion")
