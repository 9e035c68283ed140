"""One step of the model: from a plan to tokens.

`launch` does everything that needs the device and never waits for it; `finish` reads the tokens back
and looks for the ends of texts. On a CPU the two simply follow one another.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan, StepResult
from mmengine.models.plugin import MediaInput, VisionLanguageModel
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.features import FeatureStore, encode
from mmengine.runtime.inputs import StepInputs, fresh_blocks, prepare
from mmengine.runtime.kv import KVPool
from mmengine.runtime.rows import GRAMMAR, STOP_STRINGS, PositionsOf, RowColumns
from mmengine.runtime.sampler import Logprobs, Sampled, Sampler, SampleRows
from mmengine.runtime.stops import GRAMMAR_END, StopWatcher, find_stops
from mmengine.runtime.upload import upload
from mmengine.structured_output.rows import Masks, RowMatchers

NOT_FINITE = "the model gave NaN or infinite logits for this request"
NO_GRAMMARS = "this executor follows no grammars"


class Launched(msgspec.Struct, frozen=True, eq=False):
    """A step on the device. `sampled` has host tensors, to be read once the device is done with it.
    `bound`: indices of the rows that went by a grammar; `errors`: why some rows have no token."""

    batch: SampleRows
    sampled: Sampled
    bound: np.ndarray | None = None
    errors: dict[int, str] = {}


class ModelRunner:
    """Holds what lives on the device: KV pool, encoder features, token counts."""

    def __init__(
        self,
        model: VisionLanguageModel,
        positions_of: PositionsOf,
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        stop_watcher: StopWatcher | None,
        matchers: RowMatchers | None = None,
    ) -> None:
        spec = model.spec
        self._model, self._config, self._device = model, config, device
        self._watcher, self._matchers = stop_watcher, matchers
        self._kv = KVPool(spec, config.num_blocks, config.block_size, dtype, device, config.swap_blocks)
        self._attention = make_backend(attention, spec, self._kv)
        self._features = FeatureStore(spec.hidden_size, spec.num_deepstack, config.encoder_cache_size)
        self._rows = RowColumns(config.max_num_seqs, spec.vocab_size, config.eos_token_ids, positions_of)
        self._sampler = Sampler(self._rows, config.max_num_seqs, spec.vocab_size, device)
        self._media: dict[str, Sequence[MediaInput]] = {}
        # With several steps in flight: what each row sampled last, for the step behind.
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=device)

    def attach(self, request_id: str, media: Sequence[MediaInput]) -> None:
        self._media[request_id] = media

    def detach(self, request_id: str) -> None:
        self._media.pop(request_id, None)

    def pixels_of(self, plan: StepPlan) -> dict[str, Sequence[MediaInput]]:
        """The media of the requests that the step encodes something of, those that are attached."""
        if not plan.encode:
            return {}
        names = {item.request.request_id for item in plan.encode}
        return {name: self._media[name] for name in names if name in self._media}

    def launch(self, plan: StepPlan, pixels: Mapping[str, Sequence[MediaInput]]) -> Launched:
        """`pixels`: what `pixels_of` gave when the step was dispatched."""
        with torch.inference_mode():
            self._admit(plan)
            for key in plan.evict:
                self._features.drop(key)
            if plan.encode:
                encode(self._model, plan.encode, pixels, self._features, self._device)
            hidden, inputs = self._forward(plan)
            return self._sample(plan, hidden, inputs)

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            self._rows.admit(admission)
            self._sampler.admit(admission)
            options = self._rows.columns["options"][admission.row]
            if options & STOP_STRINGS and self._watcher is not None:
                self._watcher.admit(admission.row, admission.request, admission.token_ids)
            if options & GRAMMAR and self._matchers is not None:
                self._matchers.admit(admission.row, admission.request, admission.token_ids)

    def _forward(self, plan: StepPlan) -> tuple[torch.Tensor, StepInputs]:
        inputs = prepare(plan, self._rows, self._device, may_wait=self._config.max_in_flight > 1)
        self._kv.copy(plan)  # first: what is swapped out may lie in a block that is cleared next
        if self._attention.reads_unwritten:
            fresh = fresh_blocks(plan.slot_mapping, self._config.block_size)
            if len(fresh):
                self._kv.clear(upload(fresh, self._device))
        if inputs.pending.shape[1]:
            places, rows = inputs.pending
            inputs.input_ids[places] = self._last_tokens[rows]
        embeds = self._model.embed(inputs.input_ids)
        deepstack = self._features.place(plan.media, embeds)
        self._attention.begin(inputs.attention)
        return self._model.forward(embeds, deepstack, inputs.positions, self._attention), inputs

    def _sample(self, plan: StepPlan, hidden: torch.Tensor, inputs: StepInputs) -> Launched:
        batch = self._sample_rows(plan, inputs)
        if not len(plan.sample):
            return Launched(batch, Sampled(torch.empty(0, dtype=torch.int64), None))
        if inputs.sample_tokens is not None:
            hidden = hidden.index_select(0, inputs.sample_tokens)
        masks, errors = self._masks(batch)  # while the device computes
        sampled = self._sampler.sample(self._model.logits(hidden), batch, masks)
        if self._config.max_in_flight > 1:
            rows = upload(batch.rows.astype(np.int64), self._device)
            self._last_tokens[rows] = sampled.token_ids.clamp(min=0)  # a row without a token is broken
        return Launched(batch, _to_host(sampled), masks and masks.picked, errors)

    def _masks(self, batch: SampleRows) -> tuple[Masks | None, dict[int, str]]:
        """What rows with a grammar may say, and why some of them can say nothing."""
        if not batch.wanted & GRAMMAR:
            return None, {}
        picked = np.flatnonzero(batch.columns["options"] & GRAMMAR)
        if self._matchers is None:
            return None, dict.fromkeys(picked.tolist(), NO_GRAMMARS)
        masks, errors = self._matchers.masks(batch.rows, picked)
        return (masks if len(masks.picked) else None), errors

    def _sample_rows(self, plan: StepPlan, inputs: StepInputs) -> SampleRows:
        rows, num_known = plan.rows, inputs.attention.kv_lens
        if len(plan.sample) < len(rows):
            rows, num_known = rows[plan.sample], num_known[plan.sample]
        return SampleRows.of(self._rows, rows, num_known)

    def finish(self, launched: Launched) -> StepResult:
        """Read a launched step back; `device_ns` is left to the executor."""
        token_ids = launched.sampled.token_ids.numpy().astype(np.int32)
        if not len(token_ids):
            return StepResult(token_ids)
        errors = dict.fromkeys((token_ids < 0).nonzero()[0].tolist(), NOT_FINITE) | launched.errors
        stops = find_stops(token_ids, launched.batch, self._rows, self._watcher)
        if launched.bound is not None:
            stops = self._advance(launched, token_ids, stops, errors)
        if not errors and launched.sampled.logprobs is None:
            return StepResult(token_ids, stops)
        token_ids[list(errors)] = 0
        return StepResult(
            token_ids=token_ids,
            stops=tuple(stop for stop in stops if stop[0] not in errors),
            errors=tuple(sorted(errors.items())),
            logprobs=_logprob_lists(launched, token_ids, set(errors)),
        )

    def _advance(
        self,
        launched: Launched,
        token_ids: np.ndarray,
        stops: tuple[tuple[int, str], ...],
        errors: dict[int, str],
    ) -> tuple[tuple[int, str], ...]:
        """Rows with a grammar go on in it; gives `stops`, and those that it ends. An end of sequence is
        none of its tokens. Adds to `errors`."""
        over = {index for index, _ in stops} | set(errors)
        going = np.array([index for index in launched.bound.tolist() if index not in over], np.intp)
        if not len(going):
            return stops
        complete, broken = self._matchers.advance(launched.batch.rows, going, token_ids)
        errors |= broken
        return tuple(sorted([*stops, *((index, GRAMMAR_END) for index in complete)]))

    def close(self) -> None:
        self._media.clear()
        self._features.clear()


def _to_host(sampled: Sampled) -> Sampled:
    """Start the copies; on CUDA they land in pinned memory and are not waited for."""
    if sampled.token_ids.device.type == "cpu":
        return sampled
    token_ids = sampled.token_ids.to("cpu", non_blocking=True)
    if sampled.logprobs is None:
        return Sampled(token_ids, None)
    lists = sampled.logprobs
    chosen, best, ids = (
        one.to("cpu", non_blocking=True) for one in (lists.chosen, lists.best, lists.best_ids)
    )
    return Sampled(token_ids, Logprobs(lists.indices, chosen, best, ids))


def _logprob_lists(
    launched: Launched, token_ids: np.ndarray, failed: set[int]
) -> tuple[tuple[int, list[tuple[int, float]]], ...]:
    """The chosen token first, then the row's `logprobs` best ones, best first; the chosen one may be
    among them again."""
    lists = launched.sampled.logprobs
    if lists is None:
        return ()
    chosen, best, best_ids = lists.chosen.tolist(), lists.best.tolist(), lists.best_ids.tolist()
    wanted = launched.batch.columns["logprobs"][lists.indices].tolist()
    return tuple(
        (
            index,
            [(int(token_ids[index]), chosen[m]), *list(zip(best_ids[m], best[m], strict=True))[: wanted[m]]],
        )
        for m, index in enumerate(lists.indices.tolist())
        if index not in failed
    )
