"""The msgpack messages between a fleet's ingress and its replicas.

An ingress sends a ReplicaRequest. The replica sends a ReplicaName, then Accepted when its log has recorded
the request, then Outputs until the answer ends. A Heartbeat shows that a silent replica is alive. Redirect
and Rejection end the exchange early.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from mmengine.core.executor import PromptLogprobs
from mmengine.errors import (
    ErrorCode,
    ExecutorFailed,
    InvalidMedia,
    InvalidRequest,
    KeepFailed,
    LogError,
    MMEngineError,
    QueueFull,
    RequestFailed,
)
from mmengine.request import GrammarRequest, SamplingParams
from mmengine.serve.prompt.options import SubmitOptions
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.tools import ToolCallSpec
from mmengine.serve.stream.channel import Channel
from mmengine.serve.stream.request_stream import AcceptedRequest, Stream
from mmengine.serve.text.reasoning import ReasoningTokens
from mmengine.serve.text.request_output import Logprobs, RequestOutput
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.token_confidence import TokenConfidence

_ERRORS: dict[str, type[MMEngineError]] = {
    each.__name__: each
    for each in (
        InvalidMedia,
        QueueFull,
        InvalidRequest,
        RequestFailed,
        ExecutorFailed,
        KeepFailed,
        LogError,
        MMEngineError,
    )
}


class WirePrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Prompt whose media are bytes or data: URLs."""

    messages: list[dict[str, object]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    images: list[object] = []
    videos: list[object] = []
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    media_options: dict[str, object] | None = None
    template_options: dict[str, object] | None = None


class ReplicaRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that an ingress sends to a replica.

    `options`: the remaining options of `AsyncEngine.stream`. `outputs` (int32 [m]): output tokens that the
    ingress has already received. `avoid`: replicas that must redirect the request. `route`: identifies this
    ingress's attempts at the request. `is_count`: the replica only counts the prompt's tokens and sends
    Accepted. New fields need a default, because ingress and replica versions may differ during a rolling
    update.
    """

    request_id: str
    prompt: WirePrompt
    sampling: SamplingParams
    options: dict[str, object] = {}
    calls: ToolCallSpec | None = None
    outputs: bytes = b""
    sample_index: int = 0
    avoid: tuple[str, ...] = ()
    route: str = ""
    is_count: bool = False

    @property
    def output_ids(self) -> list[int]:
        return np.frombuffer(self.outputs, np.int32).tolist()


class ReplicaName(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The replica's name, which is also the name of its log."""

    replica: str


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The replica's log has recorded the request. The fields are copied from the replica's Stream."""

    reasoning: ReasoningTokens
    grammar: GrammarRequest | None
    num_embeds: dict[str, int]
    num_prompt_tokens: int

    def tell(self, channel: Channel) -> None:
        """Mark the channel as accepted, and set its fields. Call on the channel's event loop."""
        channel.reasoning, channel.num_embeds = self.reasoning, self.num_embeds
        channel.num_prompt_tokens = self.num_prompt_tokens
        channel.options = replace(channel.options, grammar=self.grammar)
        channel.texts.grammar = self.grammar
        channel.accepted.set()


class WireScores(NamedTuple):
    """PromptLogprobs as bytes: int32 ids and float32 logprobs, each [n, num_columns], for n prompt tokens."""

    num_columns: int
    token_ids: bytes
    logprobs: bytes


class WireOutput(msgspec.Struct, frozen=True, array_like=True):
    """A RequestOutput without text and completion."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    detail: str = ""
    after: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    scores: WireScores | None = None
    code: ErrorCode | None = None
    confidences: list[TokenConfidence] | None = None

    def output(self, request_id: str) -> RequestOutput:
        return RequestOutput(
            request_id,
            self.index,
            "",
            self.token_ids,
            self.finish_reason,
            after=self.after,
            logprobs=self.logprobs,
            detail=self.detail,
            code=self.code,
            prompt_scores=None if self.scores is None else _prompt_logprobs(self.scores),
            confidences=self.confidences,
        )


class AnswerEnd(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a finished answer. `prompt`: the prompt's token ids, int32 [n]."""

    prompt: bytes
    num_cached_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    notes: tuple[Note, ...] = ()


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs that became ready together. The last Outputs of a request contains the AnswerEnd."""

    outputs: list[WireOutput]
    end: AnswerEnd | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The replica is alive and has nothing to send."""


class Redirect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Another replica must continue the request, for the given reason."""

    reason: str


class Rejection(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request ended with an error and has no answer. `kind`: the error's class name."""

    kind: str
    text: str
    code: ErrorCode | None = None
    path: tuple[str | int, ...] = ()

    @classmethod
    def by(cls, error: MMEngineError) -> "Rejection":
        kinds = (each.__name__ for each in type(error).__mro__)
        return cls(next(kind for kind in kinds if kind in _ERRORS), error.text, error.code, tuple(error.path))

    def error(self) -> MMEngineError:
        return _ERRORS.get(self.kind, RequestFailed)(self.text, code=self.code, path=self.path)


ReplicaMessage = ReplicaName | Accepted | Outputs | Heartbeat | Redirect | Rejection


def wire_prompt(prompt: Prompt) -> WirePrompt:
    """Return the prompt as a message. Raises InvalidRequest if an image or video is an object or a path."""
    given = (*prompt.images, *prompt.videos)
    if prompt.base_folder is not None or not all(isinstance(each, (bytes, str)) for each in given):
        raise InvalidRequest(
            "media of a fleet's requests must be bytes or data: URLs: put them into the messages"
        )
    options = prompt.processor_options
    return WirePrompt(
        None if prompt.messages is None else list(prompt.messages),
        prompt.text,
        None if prompt.token_ids is None else list(prompt.token_ids),
        list(prompt.images),
        list(prompt.videos),
        prompt.continue_final_message,
        prompt.add_generation_prompt,
        options,
        None if prompt.template_options is None else dict(prompt.template_options),
    )


def prompt_from_wire(prompt: WirePrompt) -> Prompt:
    return Prompt(
        messages=prompt.messages,
        text=prompt.text,
        token_ids=prompt.token_ids,
        images=prompt.images,
        videos=prompt.videos,
        continue_final_message=prompt.continue_final_message,
        add_generation_prompt=prompt.add_generation_prompt,
        media_options=prompt.media_options,
        template_options=prompt.template_options,
    )


def accepted_message(request: AcceptedRequest) -> Accepted:
    return Accepted(request.reasoning, request.grammar, request.num_embeds, request.num_prompt_tokens)


def answer_end(stream: Stream) -> AnswerEnd | None:
    """Return the AnswerEnd of a stream's answer, or None if the stream is running or has failed."""
    answer = stream.completion
    if answer is None or not stream.is_over:
        return None
    prompt = answer.prompt_token_ids.astype(np.int32).tobytes()
    return AnswerEnd(prompt, answer.num_cached_tokens, answer.num_drafts, answer.num_accepted, answer.notes)


def wire_output(output: RequestOutput) -> WireOutput:
    scores = output.prompt_scores
    return WireOutput(
        output.index,
        output.token_ids,
        output.finish_reason,
        output.detail,
        output.after,
        output.logprobs,
        None
        if scores is None
        else WireScores(scores.token_ids.shape[1], scores.token_ids.tobytes(), scores.logprobs.tobytes()),
        output.code,
        output.confidences,
    )


def _prompt_logprobs(scores: WireScores) -> PromptLogprobs:
    ids = np.frombuffer(scores.token_ids, np.int32).reshape(-1, scores.num_columns)
    return PromptLogprobs(0, ids, np.frombuffer(scores.logprobs, np.float32).reshape(ids.shape))


def submit_options(request: ReplicaRequest) -> SubmitOptions:
    """Return the options for `AsyncEngine.stream`, unchecked."""
    options: SubmitOptions = msgspec.to_builtins(request.options, builtin_types=(bytes,))
    options["request_id"], options["sample_index"] = request.request_id, request.sample_index
    if request.outputs:
        options["outputs"] = request.output_ids
    if request.calls is not None:
        options["calls"] = request.calls
    return options


def as_plain(value: object) -> object:
    """Return a mapping as a dict, for the msgpack encoder. Raises TypeError for other types."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


_encode = msgspec.msgpack.Encoder(enc_hook=as_plain).encode
_decode_request = msgspec.msgpack.Decoder(ReplicaRequest).decode
_decode_message = msgspec.msgpack.Decoder(ReplicaMessage).decode


def encode(message: ReplicaRequest | ReplicaMessage) -> bytes:
    """Return the encoded message. Raises InvalidRequest for a value that msgpack does not support."""
    try:
        return _encode(message)
    except TypeError as error:
        raise InvalidRequest(
            f"a request for another process has a value that cannot be encoded: {error}"
        ) from None


def decode_request(data: bytes) -> ReplicaRequest:
    """Return the decoded request. Raises InvalidRequest."""
    try:
        return _decode_request(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"an ingress sent an invalid request: {error}") from None


def decode_message(data: bytes) -> ReplicaMessage:
    """Return a replica's decoded message. Raises RequestFailed."""
    try:
        return _decode_message(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestFailed(f"a replica sent an unknown message: {error}") from None
