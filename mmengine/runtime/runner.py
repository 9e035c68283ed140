"""Computes a model's steps on one device, from the plan to the sampled tokens.

A step has three phases. `launch` computes logits and `sample` chooses tokens, both without waiting for the
device. `finish` reads the tokens and finds stops. A step with grammars is sampled only after the previous
step's `finish`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from mmengine.block_store.base import BlockStore
from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan, StepResult
from mmengine.encoder_cache.work import EVEN_PATCHES
from mmengine.models.plugin import AuxHiddenStates, MediaInput, VisionLanguageModel
from mmengine.runtime.adapters import AdapterStore
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.invariant import check_invariant
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.port import Recorder
from mmengine.runtime.device.upload import upload
from mmengine.runtime.drafting.head.drafter import HeadDrafter
from mmengine.runtime.drafting.head.network import HeadNetwork
from mmengine.runtime.drafting.head.target_states import TargetStates
from mmengine.runtime.drafting.next_drafts import Drafting, drafts_for_no_row
from mmengine.runtime.encoder_parts import EncoderParts
from mmengine.runtime.features import FeatureStore, encode
from mmengine.runtime.graphs.capture import Capture, capture
from mmengine.runtime.graphs.decode import DecodeGraphs
from mmengine.runtime.graphs.encoder import EncoderGraphs, capture_encoder
from mmengine.runtime.inputs import StepInputs, fresh_blocks, prepare, written_slots
from mmengine.runtime.kv.features_store import FetchedFeatures
from mmengine.runtime.kv.pool import pool_of
from mmengine.runtime.kv.states import state_pool
from mmengine.runtime.kv.store_client import StoreClient
from mmengine.runtime.result_reader import ComputedStep, LaunchedStep, Reader
from mmengine.runtime.rows import GRAMMAR, STOP_STRINGS, THINKING, PositionsOf, RowColumns
from mmengine.runtime.sampling.grammar_rows import sample_grammar_rows
from mmengine.runtime.sampling.lazy_masks import LazyMaskResult
from mmengine.runtime.sampling.pooling import pool_rows
from mmengine.runtime.sampling.prompt_logprobs import PromptLogprobsGatherer
from mmengine.runtime.sampling.runs import Runs, runs_of
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import NO_FORCED_TOKENS, SampledTokens, Sampler
from mmengine.runtime.sampling.stops import StopWatcher
from mmengine.runtime.sampling.thinking import ThinkingRows
from mmengine.spec_decode.base import Drafter
from mmengine.structured_output.rows.rows import RowMatchers


class ModelRunner:
    """Owns the data on the device, such as the KV pool and encoder features, and computes steps."""

    def __init__(
        self,
        model: VisionLanguageModel,
        positions_of: PositionsOf,
        config: EngineConfig,
        placement: Placement,
        stop_watcher: StopWatcher | None,
        matchers: RowMatchers | None = None,
        drafters: Sequence[Drafter] = (),
        head: HeadNetwork | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Build a runner. `recorder`: captures decode-only steps and the encoder as graphs where possible, or
        None.
        """
        spec = model.spec
        device = placement.device.torch_device
        self._model, self._config, self._device = model, config, device
        self._watcher, self._matchers = stop_watcher, matchers
        name, invariant, groups = placement.attention, config.batch_invariant, config.block_groups
        if invariant:
            check_invariant(model, placement.device)
        self._kv = pool_of(spec, config, placement)
        self._states = state_pool(spec, config, placement)
        self._attention = make_backend(name, spec, self._kv, batch_invariant=invariant, groups=groups)
        self._features = FeatureStore(spec.hidden_size, spec.num_deepstack, config.encoder_cache_size)
        if placement.device.has_own_memory and spec.has_encoder:
            self._features.hold_all(placement.dtype, device)
        self._parts = EncoderParts(model, config.encoder_even_patches or EVEN_PATCHES, device)
        self._rows = RowColumns(
            config.max_num_seqs, spec.vocab_size, config.eos_token_ids, positions_of, spec.runs
        )
        self._sampler = Sampler(self._rows, config.max_num_seqs, spec.vocab_size, device)
        self._drafting = None
        if head is not None:
            drafters = [*drafters, HeadDrafter(head, self._rows, config, len(drafters))]
        if drafters:
            longest = config.max_model_len or spec.max_model_len
            self._drafting = Drafting(
                drafters, config.num_draft_tokens, longest, spec.vocab_size, self._rows, matchers
            )
        self.adapters = AdapterStore(model, config.max_num_seqs)
        self._thinking = ThinkingRows()
        self._reader = Reader(
            self._rows, self._sampler, stop_watcher, matchers, self._drafting, self._thinking
        )
        self.graphs: DecodeGraphs | None = None
        self._encoder_graphs: EncoderGraphs | None = None
        # The block store for KV and encoder features.
        self._store: StoreClient | None = None
        # Sends encoder features to the other ranks of a sharded model.
        self.share_features: Callable[[torch.Tensor], torch.Tensor] | None = None
        if recorder is not None:
            self.capture(recorder)
        self._media: dict[str, Sequence[MediaInput]] = {}
        self._prompt_logprobs = PromptLogprobsGatherer()
        # Each row's last sampled token, the next step's input if several steps are in flight.
        self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=device)

    @property
    def captures(self) -> str:
        """A description of the capturable steps, which ranks compare; "" if no step is capturable."""
        config, attention = self._config, self._attention
        sizes = f"{config.max_num_seqs} rows, {config.num_draft_tokens} drafts of each"
        # A pass with recurrent states takes arguments from the host, so a graph would replay old arguments.
        captures = attention.captures and self._states is None
        return f"{type(attention).__name__}, {sizes}" if captures else ""

    def capture(self, recorder: Recorder, capture: Capture = capture) -> None:
        """Capture decode-only steps, a draft head's passes and the encoder as graphs, and replay the graphs
        later.

        Skips everything that cannot be captured. `capture`: the function that captures decode-only steps.
        """
        head = self._drafting.head if self._drafting is not None else None
        config = self._config
        with torch.inference_mode():
            if self.captures:
                self.graphs = DecodeGraphs(
                    self._model,
                    self._attention,
                    recorder,
                    self._device,
                    self._kv.dtype,
                    block_size=config.block_size,
                    max_rows=config.max_num_seqs,
                    num_drafts=config.num_draft_tokens,
                    aux_hidden_states=head.aux_hidden_states(1) if head is not None else None,
                    capture=capture,
                )
            if head is not None:
                head.capture(recorder, config)
            self._encoder_graphs = capture_encoder(self._model, config.encoder_budget, recorder)

    @property
    def graph_counts(self) -> dict[str, dict[str, int]]:
        """For each kind of graph: the number of replays, and the number of runs without a replay by reason.

        The kinds are "steps", "chains" (a draft head's passes) and "encodings" (encoder calls).
        """
        found = {}
        if self.graphs is not None:
            found["steps"] = dict(self.graphs.num_steps)
        head = self._drafting.head if self._drafting is not None else None
        if head is not None and head.graphs is not None:
            found["chains"] = dict(head.graphs.num_chains)
        if self._encoder_graphs is not None:
            found["encodings"] = dict(self._encoder_graphs.num_calls)
        return found

    @property
    def drafters(self) -> list[tuple[str, int]]:
        """Each drafter's name and failure count, by drafter number."""
        return [] if self._drafting is None else self._drafting.report

    def attach(self, request_id: str, media: Sequence[MediaInput]) -> None:
        self._media[request_id] = media

    def release(self, request_id: str) -> None:
        self._media.pop(request_id, None)
        if not self._media:  # without requests, no later step would drop the partly encoded items
            self._parts.clear()

    def pixels_of(self, plan: StepPlan) -> dict[str, Sequence[MediaInput]]:
        """Return request id -> media, for the requests whose items the step encodes."""
        if not plan.encode and plan.part is None:
            return {}
        names = {item.request.request_id for item in plan.encode}
        if plan.part is not None:
            names.add(plan.part.item.request.request_id)
        return {name: self._media[name] for name in names if name in self._media}

    def use_store(
        self, store: BlockStore, config: EngineConfig, fingerprints: Mapping[str, str]
    ) -> StoreClient:
        spec, features = self._model.spec, None
        if spec.has_encoder:
            width = (1 + spec.num_deepstack) * spec.hidden_size
            features = FetchedFeatures(width, self._kv.dtype, self._device)
        self._store = StoreClient(store, self._kv, config, fingerprints, features)
        return self._store

    def take_fetched(self, plan: StepPlan) -> list[tuple[np.ndarray, torch.Tensor]]:
        """Return (block ids, KV) for the plan's blocks from the block store. Call once, at dispatch, because
        the client forgets the KV.
        """
        assert self._store is not None
        return [(blocks, self._store.take(name, len(blocks))) for name, blocks in plan.fetched]

    def launch(
        self,
        plan: StepPlan,
        pixels: Mapping[str, Sequence[MediaInput]],
        fetched: Sequence[tuple[np.ndarray, torch.Tensor]] = (),
    ) -> ComputedStep:
        """Launch a step's computation up to the logits. Call `sample` for this step before the next launch.

        `pixels`, `fetched`: the results of `pixels_of` and `take_fetched` at dispatch.
        """
        with torch.inference_mode():
            for blocks, rows in fetched:
                self._kv.fetch(blocks, rows)
            self._admit(plan)
            for key in plan.evict:
                self._features.drop(key)
                self._parts.drop(key)
            self.adapters.keep_only(plan.adapters)
            self._encode(plan, pixels)
            if not len(plan.rows):
                return self._launch_encoder_only(plan)
            runs = runs_of(plan)
            head = self._drafting.head if self._drafting is not None else None
            aux_hidden_states = head.prepare(plan) if head is not None else None
            hidden, inputs, positions = self._forward(plan, runs, aux_hidden_states)
            target_states = None
            if aux_hidden_states is not None:
                target_states = TargetStates(plan, positions, aux_hidden_states.rows)
            if head is not None and target_states is not None and drafts_for_no_row(plan):
                # The next step may be prepared before `finish` reads this step, so the head stores the states
                # now.
                head.wait(target_states)
                target_states = None
            batch, logits = self._logits(plan, runs, hidden, inputs)
            prompt_logprobs = self._prompt_logprobs.gather(plan, hidden, inputs.places, self._model.logits)
            pooled = pool_rows(plan, hidden, inputs.places, self._model.logits)
            return ComputedStep(plan, batch, logits, runs, target_states, prompt_logprobs, pooled)

    def _encode(self, plan: StepPlan, pixels: Mapping[str, Sequence[MediaInput]]) -> None:
        last = None
        if plan.part is not None:
            of_media = partial(self.adapters.of_media, plan.part.item.request)
            last = self._parts.advance(plan.part, pixels, of_media)
        for adapter, items in self.adapters.groups(plan.encode):
            encode(
                self._model,
                items,
                pixels,
                self._features,
                self._device,
                graphs=self._encoder_graphs if adapter is None else None,
                share=self.share_features,
                alone=self._config.batch_invariant,
                last=last if items[-1] is plan.encode[-1] else None,
                external=self._store,
                adapter=adapter,
            )

    def _launch_encoder_only(self, plan: StepPlan) -> ComputedStep:
        """Launch a step that only encodes media and copies blocks."""
        self._kv.copy(plan)
        return ComputedStep(
            plan, SampleRows.of(self._rows, plan.rows, plan.num_computed, None), None, None, None
        )

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admitted:
            row, request, token_ids = admission.row, admission.request, admission.token_ids
            self._rows.admit(admission)
            self.adapters.admit(admission)
            self._sampler.admit(admission)
            self._prompt_logprobs.admit(admission)
            self._thinking.admit(row, request, token_ids)
            options = self._rows.columns["options"][row]
            watcher = self._watcher if options & STOP_STRINGS else None
            if watcher is not None:
                watcher.admit(row, request, token_ids)
            if options & GRAMMAR and self._matchers is not None:
                cut = watcher.cut(row) if watcher is not None else None
                self._matchers.admit(row, request, token_ids, cut, has_repeated=self._rows.has_repeated(row))
            if self._drafting is not None:
                self._drafting.admit(admission)

    def _forward(
        self, plan: StepPlan, runs: Runs | None, aux_hidden_states: AuxHiddenStates | None
    ) -> tuple[torch.Tensor, StepInputs, torch.Tensor]:
        """Return the hidden states, the step's inputs, and the tokens' positions [3, t]. The inputs'
        `sample_tokens` are indices into the hidden states.
        """
        graphs, may_wait = self.graphs, self._config.max_in_flight > 1
        adapters = self.adapters.rows_of(plan)
        frame = graphs.frame(plan, adapted=bool(adapters)) if graphs is not None else None
        into = graphs.inputs if graphs is not None and frame is not None else None
        inputs = prepare(plan, runs, self._rows, self._device, may_wait=may_wait, frame=frame, into=into)
        self._kv.copy(plan)  # copies before `clear`, because a swapped-out block may be cleared in this step
        if self._attention.reads_unwritten:
            fresh = fresh_blocks(written_slots(plan), self._config.block_size)
            if len(fresh):
                self._kv.clear(upload(fresh, self._device))
        if inputs.pending.shape[1]:
            places, rows = inputs.pending
            inputs.input_ids[places] = self._last_tokens[rows]
        if graphs is not None and frame is not None:
            hidden = graphs.run(frame, inputs.attention)
            positions = (
                graphs.copy_aux_states(frame, aux_hidden_states, inputs.positions)
                if aux_hidden_states is not None
                else inputs.positions
            )
            return hidden[frame.places] if inputs.sample_tokens is None else hidden, inputs, positions
        embeds = self._model.embed(inputs.input_ids)
        deepstack = self._features.place(plan.media, embeds)
        self._attention.begin(inputs.attention)
        asked = () if aux_hidden_states is None else (aux_hidden_states,)
        states = () if self._states is None else (aux_hidden_states, self._states.begin(plan))
        more = {"adapters": adapters} if adapters else {}
        forward: Callable[..., torch.Tensor] = self._model.forward
        hidden = forward(embeds, deepstack, inputs.positions, self._attention, *(states or asked), **more)
        return hidden, inputs, inputs.positions

    def _logits(
        self, plan: StepPlan, runs: Runs | None, hidden: torch.Tensor, inputs: StepInputs
    ) -> tuple[SampleRows, torch.Tensor | None]:
        """Return the sampled positions, and their logits, float32 [s, vocab_size] (None without samples)."""
        batch = self._sample_rows(plan, runs, inputs)
        if not len(plan.sample):
            return batch, None
        if inputs.sample_tokens is not None:
            hidden = hidden.index_select(0, inputs.sample_tokens)
        return batch, self._model.logits(hidden)

    def sample(self, computed: ComputedStep) -> LaunchedStep:
        """Launch a step's sampling. If rows have grammars or reasoning budgets, call `finish` for the
        previous step first.
        """
        with torch.inference_mode():
            launched = self._sample(computed)
        return msgspec.structs.replace(launched, pooled=computed.pooled) if computed.pooled else launched

    def _sample(self, computed: ComputedStep) -> LaunchedStep:
        plan, batch, logits, runs = computed.plan, computed.batch, computed.logits, computed.runs
        if logits is None:
            nothing = SampledTokens(torch.empty(0, dtype=torch.int64), None)
            return LaunchedStep(
                batch, nothing, target_states=computed.target_states, draft_room=plan.draft_room
            )
        forced = self._thinking.forced_tokens(batch, runs) if batch.wanted & THINKING else NO_FORCED_TOKENS
        if batch.wanted & GRAMMAR:
            sampled, lazy_masked = sample_grammar_rows(
                self._sampler, self._matchers, logits, batch, runs, forced
            )
        else:
            sampled, lazy_masked = self._sampler.sample(logits, batch, forced=forced), LazyMaskResult({}, {})
        # Steps with drafts never overlap the next step, so they need no `_last_tokens`.
        if self._config.max_in_flight > 1 and runs is None:
            rows = upload(batch.rows.astype(np.int64), self._device)
            # A failed row has a negative token id, which is replaced by a valid id.
            self._last_tokens[rows] = sampled.token_ids.clamp(min=0)
        room = plan.draft_room
        if room is not None and len(room):
            room = room[:, plan.sample]
        return LaunchedStep(
            batch,
            sampled.to_host(),
            runs,
            lazy_masked,
            computed.target_states,
            room,
            computed.prompt_logprobs,
        )

    def _sample_rows(self, plan: StepPlan, runs: Runs | None, inputs: StepInputs) -> SampleRows:
        rows, num_known = plan.rows, inputs.attention.kv_lens
        if len(plan.sample) < len(rows):
            rows, num_known = rows[plan.sample], num_known[plan.sample]
        if runs is not None:
            rows, num_known = rows[runs.row_of], plan.token_index[runs.places] + 1
        return SampleRows.of(self._rows, rows, num_known, runs)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step, and return its result. The executor sets `device_ns` later."""
        with torch.inference_mode():
            return self._reader.read(launched)

    def close(self) -> None:
        self._media.clear()
        self._features.clear()
        self._parts.clear()
        self.adapters.clear()
        self._kv.close()
        if self._states is not None:
            self._states.close()
        if self._drafting is not None and self._drafting.head is not None:
            self._drafting.head.close()
