"""Converts a step's outputs from the core's arrays to vLLM's EngineCoreOutputs."""

import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from mmengine.core.outputs import Outputs
from mmengine.events import vocabulary as ev
from mmengine_vllm.driving.step_results import REPETITION
from mmengine_vllm.vllm_object import VllmObject

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
    "rejected": FinishReason.ERROR,
}


def reason_of(end: ev.Finished) -> FinishReason:
    """Return vLLM's finish reason for a request's end."""
    return FinishReason.REPETITION if end.detail == REPETITION else REASONS[end.reason]


class OutputMaker:
    """Makes EngineCoreOutputs. `requests`: vLLM's live requests, by id. `num_cached`: number of cached prompt
    tokens at each request's first admission, by id.

    Most outputs contain only an id and a token. A step needs more work if a request ended or may have been
    aborted. More work is also needed while any request has no output so far, asks for logprobs, has trace
    headers, or belongs to a client other than the first.
    """

    def __init__(self, requests: dict[str, VllmObject], num_cached: dict[str, int]):
        self._requests, self._num_cached = requests, num_cached
        self._unstarted: set[str] = set()
        self._special: set[str] = set()

    def add(self, request: VllmObject) -> None:
        """Prepare for a new request's outputs."""
        params, name = request.sampling_params, request.request_id
        self._unstarted.add(name)
        if (
            request.client_index
            or request.trace_headers is not None
            or params.num_logprobs is not None
            or params.prompt_logprobs is not None
        ):
            self._special.add(name)

    def forget(self, request_id: str) -> None:
        self._unstarted.discard(request_id)
        self._special.discard(request_id)

    def of_step(
        self,
        outputs: Outputs,
        names: list[str],
        tokens: list[list[int]],
        results: VllmObject,
        *,
        may_have_left: bool = True,
    ) -> dict[int, list[EngineCoreOutput]]:
        """Return a step's outputs for each client.

        `names`, `tokens`: the request ids and the sampled tokens from the workers. `results`: the workers'
        ModelRunnerOutput with the logprobs. `may_have_left`: whether requests may have been aborted during
        the step.
        """
        states, _, counts = outputs.columns()
        if counts is not None or len(states) != len(names):  # the core dropped tokens, or a row failed
            names, tokens = _columns_of(outputs)
        made = list(map(EngineCoreOutput, names, tokens))
        if outputs.ends or self._unstarted or self._special or may_have_left:
            return self._completed(made, outputs, results)
        return {0: made} if made else {}

    def of_late(self, outputs: Outputs) -> dict[int, list[EngineCoreOutput]]:
        """Return each client's outputs outside a step: ends of requests, and tokens that the core held back
        while the log could not be written. Such tokens have no logprobs.
        """
        return self._completed(list(map(EngineCoreOutput, *_columns_of(outputs))), outputs, None)

    def _completed(
        self, made: list[EngineCoreOutput], outputs: Outputs, results: VllmObject
    ) -> dict[int, list[EngineCoreOutput]]:
        """Add finish reasons, prefill statistics and logprobs, and return the outputs by client. Requests
        that were aborted during the step are left out.
        """
        ends, by_client = dict(outputs.ends), dict[int, list[EngineCoreOutput]]()
        for output in made:
            name = output.request_id
            if (request := self._requests.get(name)) is None:
                continue
            if name in self._unstarted:
                self._unstarted.remove(name)
                output.prefill_stats = self._prefill_stats(request)
            if name in ends:
                _end(output, request, ends.pop(name)[0])
            if name in self._special:
                _add_logprobs(output, request, results)
                output.trace_headers = request.trace_headers
            by_client.setdefault(request.client_index, []).append(output)
        for name, (end, _) in ends.items():
            if (request := self._requests.get(name)) is not None:
                ended = _end(EngineCoreOutput(name, []), request, end)
                by_client.setdefault(request.client_index, []).append(ended)
        return by_client

    def _prefill_stats(self, request: VllmObject) -> PrefillStats:
        stats = PrefillStats()
        stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=self._num_cached.get(request.request_id, 0),
            num_external_cached_tokens=0,
        )
        return stats


def _columns_of(outputs: Outputs) -> tuple[list[str], list[list[int]]]:
    """Return the ids and tokens of the requests with new tokens."""
    states, values, counts = outputs.columns()
    tokens = values.tolist()
    ends = range(1, len(tokens) + 1) if counts is None else np.cumsum(counts).tolist()
    names = [state.request.request_id for state in states.tolist()]
    return names, [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _end(output: EngineCoreOutput, request: VllmObject, end: ev.Finished) -> EngineCoreOutput:
    output.finish_reason, output.stop_reason = reason_of(end), request.stop_reason
    return output


def _add_logprobs(output: EngineCoreOutput, request: VllmObject, results: VllmObject) -> None:
    index = None if results is None else results.req_id_to_index.get(request.request_id)
    if index is None:
        return
    if results.logprobs is not None and request.sampling_params.num_logprobs is not None:
        output.new_logprobs = results.logprobs.slice_request(index, len(output.new_token_ids))
    output.new_prompt_logprobs_tensors = results.prompt_logprobs_dict.get(request.request_id)
