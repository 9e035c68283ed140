"""Submits prepared prompts to the engine core as requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from mmengine.config import EngineConfig
from mmengine.core.state.view import View
from mmengine.encoder_cache.cache import encoder_key
from mmengine.encoder_cache.work import work_of
from mmengine.errors import FIELD, FieldPath, InvalidRequest, id_in_use
from mmengine.models.plugin import MediaInput, Prepared
from mmengine.request import GrammarRequest, Request
from mmengine.serve.prompt.options import Options
from mmengine.serve.prompt.prompt import core_requests, request_ids
from mmengine.serve.prompt.session_turns import SessionPlace
from mmengine.serve.requests.adapters import Adapters
from mmengine.serve.requests.metrics import Metrics
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.requests.request_resources import GrammarMemory, RequestResources
from mmengine.serve.requests.running_requests import RunningRequests
from mmengine.serve.requests.sessions import Sessions
from mmengine.serve.text.reasoning import Reasoning
from mmengine.structured_output.json_schema.vocabulary.notes import Note
from mmengine.structured_output.request.spec import HAS_JSON

if TYPE_CHECKING:  # importing mmengine.build imports torch
    from mmengine.build import Built

LOWERED_BY = "max_pixels"  # option of requests and of `mmengine run` that makes images smaller
MAX_NOTED = 1_000  # maximum number of notes that are remembered, so that each note is logged only once
MAX_LOGGED_NOTES = 10  # maximum number of logged notes for a response format
OTHER_ADAPTER = (
    "a session keeps the adapter with which it was opened: leave out adapter, or open another session"
)


class LargeMedia(NamedTuple):
    """An image or a video that takes long to encode.

    `tokens` is the prompt token count for the item. `seconds` is the estimated encoding time on an idle
    device, from the speed that was measured when the model was loaded.
    """

    modality: str
    tokens: int
    seconds: float

    def __str__(self) -> str:
        time = f"{self.seconds:.0f} seconds" if self.seconds < 90 else f"{self.seconds / 60:.0f} minutes"
        option = LOWERED_BY.replace("_", "-")
        return (
            f"the {self.modality} takes {self.tokens:,} tokens, and the encoder about {time}; "
            f"--{option} makes it smaller"
        )


def large_media(request: Request, config: EngineConfig, view: View) -> Iterator[LargeMedia]:
    """Yield the request's items that are encoded over several steps and are not in the encoder cache."""
    for item in request.media if config.encoder_piece else ():
        work = work_of(item.grid, config.encoder_even_patches)
        if work <= config.encoder_piece:
            continue
        if not view.encoder.has(encoder_key(item.mm_hash, request.cache_salt, request.visual_adapter)):
            yield LargeMedia(item.modality, item.num_embeds, work * config.encoder_work_ns / 1e9)


class Submission:
    """Creates and submits core requests, and registers them with the request resources, the metrics and
    RunningRequests.
    """

    def __init__(
        self,
        built: "Built",
        resources: RequestResources,
        running: RunningRequests,
        metrics: Metrics,
        reasoning: Reasoning,
        grammar_memory: GrammarMemory,
        sessions: Sessions,
        adapters: Adapters,
    ):
        self._core, self._vocab_size = built.core, built.spec.vocab_size
        self._grammar_backend = built.grammars.backend
        self._resources, self._running, self._metrics = resources, running, metrics
        self._reasoning, self._grammar_memory = reasoning, grammar_memory
        self._sessions, self._adapters = sessions, adapters
        self._new_id = request_ids()
        self._noted: set[tuple[Note, ...]] = set()
        self.on_large_media: Callable[[LargeMedia], None] = lambda large: None

    def submit(self, prepared: Prepared, options: Options, *, stream: bool) -> str:
        """Queue a prompt and return its request id.

        If InvalidRequest or QueueFull is raised, nothing is queued.
        """
        options.check()
        options.sampling.check_vocabulary(self._vocab_size)
        self._check_outputs(options.outputs)
        request_id = options.request_id or self._new_id()
        if request_id in self._running:
            raise id_in_use(request_id)
        options = options.of_prompt(len(prepared.prompt_token_ids))
        options = self._reasoning.settle(options, prepared.prompt_token_ids)
        options = self._reasoning.with_budget(options, prepared.prompt_token_ids)
        if options.grammar is not None:
            grammar = self._grammar_memory.shared(self._with_max_digits(options.grammar))
            notes = options.notes + self._grammar_backend.notes(grammar)
            options = replace(options, grammar=grammar, notes=notes)
        if options.place is not None:
            prepared, requests = self._submit_to_session(request_id, prepared, options, options.place)
        else:
            adapter = self._adapters.named(options.adapter)
            requests = core_requests(request_id, prepared, options, adapter)
            self._submit_all(requests, prepared, options.prepared_s)
        self._running.begin(request_id, prepared, requests, stream, options.notes)
        self._report_large_media(request_id, requests[0])
        if options.notes and options.notes not in self._noted:
            self._log_notes(request_id, options.notes)
        return request_id

    def _with_max_digits(self, grammar: GrammarRequest) -> GrammarRequest:
        """Return the grammar with the engine's digit limit if the request sets no limit."""
        if grammar.max_digits is not None or grammar.kind not in HAS_JSON:
            return grammar
        return msgspec.structs.replace(grammar, max_digits=self._core.config.max_digits)

    def _submit_to_session(
        self, request_id: str, prepared: Prepared, options: Options, place: SessionPlace
    ) -> tuple[Prepared, list[Request]]:
        """Append a prompt to its session. Returns the session's whole prompt, and a list with the prompt's
        core request.
        """
        adapter = self._sessions.adapter(place.session_id)
        if options.adapter and (adapter is None or options.adapter != adapter.name):
            raise InvalidRequest(OTHER_ADAPTER)
        chain = self._sessions.chain(prepared, place, options.sampling.max_tokens)
        whole = replace(prepared, prompt_token_ids=chain.tokens, media=())
        (request,) = core_requests(request_id, whole, options, adapter)
        request = replace(request, media=chain.media)
        inputs = self._sessions.hold(prepared, place, chain)
        self._resources.hold(request, inputs, (*prepared.media, *place.loaded))
        self._hold_adapter(request)
        try:
            self._core.sessions.append(
                place.session_id,
                request,
                num_kept=chain.num_kept,
                num_opening=chain.num_opening,
                is_anchor=place.is_anchor,
                film=chain.film,
            )
        except Exception:
            self._resources.release(request_id)
            raise
        self._metrics.submitted(request, 1, options.prepared_s)
        return whole, [request]

    def _report_large_media(self, request_id: str, request: Request) -> None:
        for large in large_media(request, self._core.config, self._core.view):
            operator_log.info(
                f"large {large.modality}",
                request_id=request_id,
                tokens=large.tokens,
                encoder_s=round(large.seconds, 1),
                lowered_by=LOWERED_BY,
            )
            self.on_large_media(large)

    def _check_outputs(self, outputs: Sequence[int]) -> None:
        highest = max(outputs, default=0)
        if highest >= self._vocab_size:
            raise InvalidRequest(
                f"{FIELD} contain the token {highest}, but this model's ids end at {self._vocab_size - 1}: "
                "send outputs only to an engine with the model that generated them",
                path=FieldPath("outputs"),
            )

    def _log_notes(self, request_id: str, notes: tuple[Note, ...]) -> None:
        """Log notes once, even if many requests have the same notes."""
        if len(self._noted) < MAX_NOTED:
            self._noted.add(notes)
        texts = [f"{note.pointer}: {note.text}" for note in notes[:MAX_LOGGED_NOTES]]
        operator_log.info("form has notes", request_id=request_id, count=len(notes), notes=texts)

    def _submit_all(self, requests: list[Request], prepared: Prepared, prepared_s: float) -> None:
        """Submit the core requests for all choices.

        If a choice is refused, for example because the queue is full, all earlier choices are cancelled.
        """
        for count, request in enumerate(requests):
            try:
                self._submit_one(request, prepared.media)
                self._metrics.submitted(request, len(requests), prepared_s)
            except Exception:
                for taken in requests[:count]:
                    self._core.cancel(taken.request_id, "another answer to the same prompt was refused")
                raise

    def _submit_one(self, request: Request, media: Sequence[MediaInput]) -> None:
        self._resources.hold(request, media)
        self._hold_adapter(request)
        try:
            self._core.submit(request)
        except Exception:
            self._resources.release(request.request_id)
            raise

    def _hold_adapter(self, request: Request) -> None:
        if request.adapter is not None:
            self._adapters.hold(request.request_id, request.adapter)
