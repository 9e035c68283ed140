"""Makes vLLM's outputs of a step from the core's columns."""

from collections import defaultdict

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
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
    """Return vLLM's reason for the end of a request."""
    return FinishReason.REPETITION if end.detail == REPETITION else REASONS[end.reason]


class OutputMaker:
    """Makes EngineCoreOutputs. `requests`: vLLM's requests that have not ended, by id. `num_cached`: how many
    prompt tokens were cached, for requests that had no output yet.
    """

    def __init__(self, requests: dict[str, VllmObject], num_cached: dict[str, int]):
        self._requests, self._num_cached = requests, num_cached
        self._started: set[str] = set()  # requests that had an output

    def forget(self, request_id: str) -> None:
        self._started.discard(request_id)

    def outputs(self, outputs: Outputs, results: VllmObject = None) -> dict[int, list[EngineCoreOutput]]:
        """Return each client's outputs. `results`: the workers' ModelRunnerOutput, whose logprobs are passed
        on.
        """
        made: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        states, tokens, counts = outputs.columns()
        ends = dict(outputs.ends)
        values = tokens.tolist()
        stops = range(1, len(values) + 1) if counts is None else np.cumsum(counts).tolist()
        start, requests = 0, self._requests
        for state, stop in zip(states.tolist(), stops, strict=True):
            name = state.request.request_id
            request, new, start = requests.get(name), values[start:stop], stop
            if request is None:  # the request was aborted while the step ran
                continue
            output = EngineCoreOutput(name, new)
            if name not in self._started:
                self._started.add(name)
                output.prefill_stats = self._prefill_stats(request)
            if name in ends:
                self._end(output, request, ends.pop(name)[0])
            if results is not None and (results.logprobs or results.prompt_logprobs_dict):
                _add_logprobs(output, request, results)
            if request.trace_headers is not None:
                output.trace_headers = request.trace_headers
            made[request.client_index].append(output)
        for name, (end, _) in ends.items():
            if (request := requests.get(name)) is not None:
                made[request.client_index].append(self._end(EngineCoreOutput(name, []), request, end))
        return made

    def _end(self, output: EngineCoreOutput, request: VllmObject, end: ev.Finished) -> EngineCoreOutput:
        output.finish_reason, output.stop_reason = reason_of(end), request.stop_reason
        return output

    def _prefill_stats(self, request: VllmObject) -> PrefillStats:
        stats = PrefillStats()
        stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=self._num_cached.get(request.request_id, 0),
            num_external_cached_tokens=0,
        )
        return stats


def _add_logprobs(output: EngineCoreOutput, request: VllmObject, results: VllmObject) -> None:
    index = results.req_id_to_index.get(request.request_id)
    if index is None:
        return
    if results.logprobs and request.sampling_params.num_logprobs is not None:
        output.new_logprobs = results.logprobs.slice_request(index, len(output.new_token_ids))
    output.new_prompt_logprobs_tensors = results.prompt_logprobs_dict.get(request.request_id)


def by_client(made: dict[int, list[EngineCoreOutput]]) -> dict[int, EngineCoreOutputs]:
    """Return vLLM's answer to an update: each client's outputs."""
    return {client: EngineCoreOutputs(outputs=of_client) for client, of_client in made.items()}
