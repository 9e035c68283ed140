"""Admits waiting requests as vLLM does."""

from mmengine.core.decide.adapter_places import AdapterPlaces
from mmengine.core.decide.admission import Admission, MayStart
from mmengine.core.decide.vllm.encoder_draft import VllmEncoderDraft
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View


class UnreservedPlaces(AdapterPlaces):
    """Places for adapters without reservations."""

    def pass_over(self, req_state: RequestView) -> None:
        """Do nothing: vLLM reserves no place for a request that it passes over."""


class VllmAdmission(Admission):
    """Admits waiting requests by vLLM's rules."""

    def draft(self, view: View) -> VllmEncoderDraft:
        return VllmEncoderDraft(view)

    def places(self, view: View, may_start: MayStart | None = None) -> AdapterPlaces | None:
        return UnreservedPlaces(view, may_start) if view.config.max_loras else None

    def padding(self, view: View, num_computed: int) -> int:
        """Return how many placeholders make the request as long as its step's decodes.

        vLLM wants equal lengths in a step of decodes, which is a step without a running row in its prompt. A
        prompt of one token that runs alone is no decode.
        """
        num_drafts = view.config.num_draft_tokens
        if not num_drafts or num_computed + num_drafts + 2 > view.config.max_model_len:
            return 0
        ran = [view.requests_by_row[row] for row in view.step_rows.tolist()]
        ran = [req_state for req_state in ran if req_state.admitted_step < view.step]
        decodes = all(len(req_state.tokens) < view.num_tokens[req_state.row] for req_state in ran)
        return num_drafts if (ran or num_computed) and decodes else 0

    def prompt_reserve(self, view: View, req_state: RequestView) -> int:
        """Return how many blocks the prompt needs, without slots for the drafter."""
        return -(-len(req_state.tokens) // view.block_size)
