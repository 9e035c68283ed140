"""Translates vLLM's workers' results to a StepResult for the core, with vLLM's stop rules."""

from itertools import chain

import numpy as np
from vllm.v1.core.sched.utils import check_sequence_repetition

from mmengine.core.executor import StepPlan, StepResult
from mmengine_vllm.driving.requests import NEVER_STOPS, eos_of
from mmengine_vllm.vllm_object import VllmObject

EOS, TOKEN, REPETITION = "eos", "token", "repetition"


class StopRules:
    """Finds the rows that stop, by vLLM's rules.

    EOS tokens are compared for all rows at once. Rows with stop tokens, a grammar or repetition detection are
    checked one by one. `accepts`: a method of vLLM's structured output manager. It advances a request's
    grammar by tokens, and returns False if the grammar does not allow the tokens.
    """

    def __init__(self, num_rows: int, accepts: VllmObject):
        self._eos = np.full(num_rows, NEVER_STOPS, np.int64)
        self._is_watched = np.zeros(num_rows, bool)
        self._accepts = accepts

    def admit(self, row: int, request: VllmObject) -> None:
        """Set the row's rules for a new request."""
        params = request.sampling_params
        self._eos[row] = eos_of(request)
        self._is_watched[row] = bool(
            params.stop_token_ids
            or request.use_structured_output
            or getattr(params, "repetition_detection", None)
        )

    def result(
        self,
        plan: StepPlan,
        requests: dict[str, VllmObject],
        names: list[str],
        sampled: list[list[int]],
        has_drafts: bool,
    ) -> StepResult:
        """Return a step's result.

        `requests`: vLLM's live requests, by id. `names`: ids of the requests that sample. `sampled`: the
        tokens of `names`. This method cuts each list after the token that stops the request.
        """
        rows = plan.rows if len(plan.sample) == len(plan.rows) else plan.rows[plan.sample]
        stops, errors = dict[int, str](), dict[int, str]()
        tokens = None if has_drafts else _one_each(sampled)
        if tokens is None:
            tokens = self._find_ends(rows, sampled, stops, errors)
        elif (hits := tokens == self._eos[rows]).any():
            stops = dict.fromkeys(hits.nonzero()[0].tolist(), EOS)
        for place in self._is_watched[rows].nonzero()[0].tolist():
            request = requests.get(names[place])
            if request is not None and place not in errors:
                self._watch(place, request, sampled[place], stops, errors)
        counts = None
        if has_drafts:
            tokens = np.fromiter(chain.from_iterable(sampled), np.int32)
            counts = np.fromiter(map(len, sampled), np.int32, len(sampled))
        return StepResult(tokens, tuple(sorted(stops.items())), tuple(sorted(errors.items())), counts=counts)

    def _find_ends(
        self, rows: np.ndarray, sampled: list[list[int]], stops: dict[int, str], errors: dict[int, str]
    ) -> np.ndarray:
        """Add stops to `stops`, and rows without a token to `errors`. Return all rows' tokens, int32."""
        counts = np.fromiter(map(len, sampled), np.int32, len(sampled))
        for place in (counts == 0).nonzero()[0].tolist():
            sampled[place] = [0]  # the core drops the token of a failed row
            errors[place] = "the workers returned no token"
        tokens = np.fromiter(chain.from_iterable(sampled), np.int32)
        owners = rows if len(tokens) == len(rows) else np.repeat(rows, np.maximum(counts, 1))
        if (hits := tokens == self._eos[owners]).any():
            places = np.repeat(np.arange(len(rows)), np.maximum(counts, 1))
            for place in np.unique(places[hits]).tolist():
                end = sampled[place].index(int(self._eos[rows[place]])) + 1
                del sampled[place][end:]
                stops[place] = EOS
        return tokens

    def _watch(
        self,
        place: int,
        request: VllmObject,
        tokens: list[int],
        stops: dict[int, str],
        errors: dict[int, str],
    ) -> None:
        """Check a row for stop tokens, repetitions and tokens that its grammar refuses."""
        params = request.sampling_params
        for number, token in enumerate(tokens, 1):
            request.append_output_token_ids(token)
            if number == len(tokens) and stops.get(place) == EOS:
                break
            detection = getattr(params, "repetition_detection", None)
            if token in (params.stop_token_ids or ()):
                stops[place], request.stop_reason = TOKEN, token
            elif (
                detection is not None
                and request.num_output_tokens >= params.min_tokens
                and check_sequence_repetition(request.output_token_ids, detection)
            ):
                stops[place], request.stop_reason = REPETITION, "repetition_detected"
            else:
                continue
            del tokens[number:]
            break
        if not self._accepts(request, tokens):
            errors[place] = "the grammar refused a sampled token"
            stops.pop(place, None)


def _one_each(sampled: list[list[int]]) -> np.ndarray | None:
    """Return the rows' tokens, int32, or None if a row does not have exactly one token."""
    try:
        return np.array([token for (token,) in sampled], np.int32)
    except ValueError:
        return None
