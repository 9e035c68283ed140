"""Stand-in for vLLM's workers, which computes tokens from the scheduler's outputs."""

from types import SimpleNamespace

EOS = 2


class Workers:
    """Replaces vLLM's workers. Stores KV by slot, the identifiers of encoder outputs, and the scheduled
    requests.

    A request's next token is a function of the KV in its blocks. Wrong blocks, positions or tokens from the
    scheduler therefore cause wrong tokens. `is_second_runner`: whether to behave like vLLM's V2 model runner.
    """

    def __init__(self, block_size, *, is_second_runner=False, num_drafts=0):
        self.size, self.is_second, self.num_drafts = block_size, is_second_runner, num_drafts
        self.kv, self.features, self.requests, self.drafts = {}, set(), {}, {}

    def run(self, output):
        for name in output.finished_req_ids:
            self.requests.pop(name)
        if self.is_second:
            for name in output.preempted_req_ids or ():
                self.requests.pop(name)
        for identifier in output.free_encoder_mm_hashes:
            self.features.remove(identifier)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self.is_second else new.prompt_token_ids
            self.requests[new.req_id] = SimpleNamespace(
                tokens=list(tokens), blocks=list(new.block_ids[0]), computed=new.num_computed_tokens, new=new
            )
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            request = self.requests[name]
            blocks = cached.new_block_ids[place]
            if name in cached.resumed_req_ids:
                request.blocks, request.tokens = list(blocks[0]), list(cached.all_token_ids[name])
            elif blocks:
                request.blocks += blocks[0]
            request.computed = cached.num_computed_tokens[place]
            told = cached.num_output_tokens[place]
            assert told == len(request.tokens) - len(request.new.prompt_token_ids)
        for name, items in output.scheduled_encoder_inputs.items():
            self.features |= {self.requests[name].new.mm_features[item].identifier for item in items}
        sampled = {
            name: self._compute(name, count, output) for name, count in output.num_scheduled_tokens.items()
        }
        names = sorted(sampled)  # the workers' order is not the scheduler's
        return SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            logprobs=None,
            prompt_logprobs_dict={},
        )

    def _compute(self, name, count, output):
        request = self.requests[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        tokens = request.tokens + drafts
        for item in request.new.mm_features:
            position = item.mm_position
            ahead = range(request.computed, request.computed + count)
            if max(ahead[0], position.offset) < min(ahead[-1] + 1, position.offset + position.length):
                assert item.identifier in self.features
        for index in range(request.computed, request.computed + count):
            self.kv[request.blocks[index // self.size], index % self.size] = tokens[index]
        if request.computed + count < len(request.tokens):
            return []  # Only a part of the prompt is computed.
        made = []
        for length in range(len(request.tokens), len(tokens) + 1):
            made.append(self._next(request, length))
            if length < len(tokens) and made[-1] != tokens[length]:
                break
        request.tokens += made
        return list(made)

    def _next(self, request, length):
        held = [self.kv[request.blocks[index // self.size], index % self.size] for index in range(length)]
        return next_token(held)

    def propose(self):
        """Return drafts, some of which are right."""
        names = [name for name, request in self.requests.items() if request.computed < len(request.tokens)]
        guesses = []
        for name in names:
            tokens, guess = list(self.requests[name].tokens), []
            for number in range(self.num_drafts):
                guess.append(next_token(tokens + guess) if (len(tokens) + number) % 3 else 1)
            guesses.append(guess)
        return SimpleNamespace(req_ids=names, draft_token_ids=guesses)


def next_token(tokens):
    """Return the next token, which depends on all `tokens` and their order."""
    total = 0
    for token in tokens:
        total = (total * 31 + token + 7) % 1000003
    return 2 + total % 97


def answer(request, max_model_len):
    """Return the tokens that a request must get."""
    tokens = list(request.prompt_token_ids)
    while len(tokens) < max_model_len and len(tokens) - request.num_prompt_tokens < request.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS or tokens[-1] in request.sampling_params.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]
