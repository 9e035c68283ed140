"""A fake of vLLM's scheduler, for tests without vLLM: FCFS, a single KV group, no chunked prefill, no prefix
hits, a token per row and step.
"""

from collections import deque
from enum import Enum
from types import SimpleNamespace

Status = Enum(
    "Status",
    "WAITING RUNNING PREEMPTED WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR FINISHED_STOPPED FINISHED_LENGTH_CAPPED "
    "FINISHED_ABORTED FINISHED_ERROR",
)
EOS = 2


class FullAttentionSpec:
    """Marks a KV group as full attention by its class name."""


class FakeRequest:
    """Has the attributes of vLLM's Request that the recorder and FakeScheduler read."""

    def __init__(self, request_id, prompt, max_tokens=8, *, mm_features=(), salt=None, grammar=None):
        self.request_id, self.prompt_token_ids, self.max_tokens = request_id, prompt, max_tokens
        self.sampling_params = SimpleNamespace(
            temperature=0.0, min_tokens=0, ignore_eos=False, stop_token_ids=[], structured_outputs=grammar
        )
        self.use_structured_output = grammar is not None
        self.status = Status.WAITING
        if grammar is not None:
            self.status = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.mm_features, self.cache_salt, self.lora_request, self.priority = mm_features, salt, None, 0
        self.num_prompt_tokens, self.num_computed_tokens = len(prompt), 0
        self.tokens, self.blocks, self.stop_reason, self.spec_token_ids = list(prompt), [], None, []

    @property
    def num_tokens(self):
        return len(self.tokens)

    @property
    def all_token_ids(self):
        return self.tokens

    def is_finished(self):
        return self.status.name.startswith("FINISHED")


class FakeScheduler:
    """A scheduler with `num_blocks` KV blocks, including the unused block 0."""

    def __init__(self, *, max_num_seqs=4, num_blocks=32, block_size=4, max_model_len=64, overlaps=False):
        self.scheduler_config = SimpleNamespace(
            policy="fcfs", long_prefill_token_threshold=0, async_scheduling=overlaps
        )
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
        self.kv_cache_config = SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group])
        self.cache_config = SimpleNamespace(enable_prefix_caching=True)
        self.encoder_cache_manager = SimpleNamespace(cache_size=64)
        self.max_num_running_reqs, self.max_num_scheduled_tokens = max_num_seqs, 256
        self.max_model_len, self.block_size, self.max_num_encoder_input_tokens = max_model_len, block_size, 64
        self.scheduler_reserve_full_isl, self.connector = True, None
        self.requests, self.waiting, self.running = {}, deque(), []
        self.free = list(range(1, num_blocks))
        self.encoded, self.freed = set(), []
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: (list(self.requests[name].blocks),)
        )

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids, finished_status):
        ids = [request_ids] if isinstance(request_ids, str) else request_ids or list(self.requests)
        ended = [self.requests[name] for name in ids if name in self.requests]
        for request in ended:
            self._end(request, finished_status)
        return ended

    def _end(self, request, status):
        request.status = status
        self._free(request)
        del self.requests[request.request_id]
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def _free(self, request):
        self.free += reversed(request.blocks)
        request.blocks = []

    def _grow(self, request, num_tokens):
        """Return the new blocks for `num_tokens` more tokens, or None if too few are free."""
        want = -(-(request.num_computed_tokens + num_tokens) // self.block_size) - len(request.blocks)
        if want > len(self.free):
            return None
        new = [self.free.pop(0) for _ in range(want)]
        request.blocks += new
        return new

    def schedule(self):
        counts, given, preempted = {}, {}, []
        for request in list(self.running):
            left = len(request.tokens) - request.num_computed_tokens + request.pending
            while left and request in self.running and (new := self._grow(request, left)) is None:
                victim = self.running.pop()
                self._free(victim)
                victim.status, victim.num_computed_tokens = Status.PREEMPTED, 0
                self.waiting.appendleft(victim)
                preempted.append(victim.request_id)
            if left and request in self.running:
                counts[request.request_id], given[request.request_id] = left, new
        fresh, resumed, encode = [], [], {}
        while self.waiting and not preempted and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            if request.status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR or (
                self._grow(request, len(request.tokens)) is None
            ):
                break
            self.running.append(self.waiting.popleft())
            (resumed if request.status is Status.PREEMPTED else fresh).append(request)
            request.status, request.pending = Status.RUNNING, 0
            counts[request.request_id] = len(request.tokens)
            wanted = [n for n, item in enumerate(request.mm_features) if item.identifier not in self.encoded]
            if wanted:
                encode[request.request_id] = wanted
                self.encoded.update(request.mm_features[n].identifier for n in wanted)
        output = self._output(counts, given, fresh, resumed, preempted, encode)
        for name, count in counts.items():
            self.requests[name].num_computed_tokens += count
            self.requests[name].pending = int(self.scheduler_config.async_scheduling)
        return output

    def _output(self, counts, given, fresh, resumed, preempted, encode):
        running = list(given)
        cached = SimpleNamespace(
            req_ids=[*running, *(request.request_id for request in resumed)],
            resumed_req_ids={request.request_id for request in resumed},
            new_block_ids=[
                *((given[name],) if given[name] else None for name in running),
                *((list(request.blocks),) for request in resumed),
            ],
            num_computed_tokens=[
                self.requests[name].num_computed_tokens
                for name in (*running, *(request.request_id for request in resumed))
            ],
        )
        freed, self.freed = self.freed, []
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=each.request_id, block_ids=(list(each.blocks),), num_computed_tokens=0)
                for each in fresh
            ],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs=encode,
            preempted_req_ids=set(preempted),
            free_encoder_mm_hashes=freed,
        )

    def update_from_output(self, scheduler_output, model_runner_output):
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None:
                continue
            tokens = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]]
            request.tokens += tokens
            request.pending = 0
            if EOS in tokens:
                self._end(request, Status.FINISHED_STOPPED)
            elif len(request.tokens) - request.num_prompt_tokens >= request.max_tokens:
                self._end(request, Status.FINISHED_LENGTH_CAPPED)
        return {}

    def update_draft_token_ids(self, draft_token_ids):
        """Ignore drafts."""

    def reset_prefix_cache(self, reset_running_requests=False):
        while reset_running_requests and self.running:
            request = self.running.pop()
            self._free(request)
            request.status, request.num_computed_tokens = Status.PREEMPTED, 0
            self.waiting.appendleft(request)
        return True

    def reset_encoder_cache(self):
        self.encoded.clear()

    def set_pause_state(self, pause_state):
        """Ignore pauses."""

    def shutdown(self):
        """Do nothing."""


def run_output(output, next_token):
    """Return a model runner's result for `output`, with requests sorted by id. `next_token`: maps a request
    id to a token.
    """
    names = sorted(output.num_scheduled_tokens)
    return SimpleNamespace(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[next_token(name)] for name in names],
    )
