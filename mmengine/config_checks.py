"""Checks for settings that exclude each other, or that contradict the model or the scheduler.

An error text names both settings and recommends a change.
"""

from collections.abc import Iterator

from mmengine.block_groups import groups_problem
from mmengine.engine_settings import EngineSettings
from mmengine.model_settings import ModelSettings


def contradictions(config: ModelSettings) -> Iterator[str]:
    """Yield an error for each pair of settings that exclude each other."""
    yield from _own_contradictions(config)
    yield from _block_store(config)
    yield from _model_rules(config)
    yield from _block_groups(config)
    yield from _vllm_scheduler(config) if config.compat else _own_scheduler(config)


def _own_contradictions(config: EngineSettings) -> Iterator[str]:
    """Yield an error for each pair of settings that exclude each other, both under mmengine's scheduling
    rules and under vLLM's.
    """
    budget, drafts = config.token_budget, config.num_draft_tokens
    if budget < config.max_num_seqs:
        yield (
            f"token_budget {budget} is smaller than max_num_seqs {config.max_num_seqs}: some rows would "
            "never get a token; raise token_budget or lower max_num_seqs"
        )
    if config.draft_policy == "goodput" and config.compat:
        yield (
            f"draft_policy goodput cannot go with compat {config.compat}, which verifies all drafts; set "
            "draft_policy auto, or no compat"
        )
    if config.lookahead_tokens and not drafts:
        yield (
            f"lookahead_tokens {config.lookahead_tokens} keeps KV slots for a drafter, but num_draft_tokens "
            "is 0; set num_draft_tokens, or no lookahead_tokens"
        )
    if config.max_in_flight > 1 and config.compat:
        yield (
            f"max_in_flight {config.max_in_flight} cannot go with compat {config.compat}: vLLM's decisions "
            "are compared step by step; set max_in_flight 1, or no compat"
        )
    if config.batch_invariant and config.tensor_parallel > 1:
        yield (
            f"batch_invariant cannot go with tensor_parallel {config.tensor_parallel}: ranks compute with "
            "torch's products, whose bits depend on the number of rows; choose one of them"
        )
    if config.preempt_mode == "swap" and not config.swap_blocks:
        yield "preempt_mode swap needs a host pool: set swap_blocks, or another preempt_mode"
    if config.preempt_mode == "recompute" and config.swap_blocks:
        yield (
            f"swap_blocks {config.swap_blocks} would never be used with preempt_mode recompute; set "
            "swap_blocks 0, or preempt_mode auto or swap"
        )
    if config.num_state_slots and config.compat:
        yield f"compat {config.compat} knows no recurrent states (num_state_slots {config.num_state_slots})"
    if config.num_state_slots and config.swap_blocks:
        yield (
            f"swap_blocks {config.swap_blocks} would never be used: preempted requests of a model with "
            "recurrent states are computed again from the last kept state; set swap_blocks 0"
        )
    if config.max_loras and config.tensor_parallel > 1:
        yield (
            f"max_loras {config.max_loras} cannot go with tensor_parallel {config.tensor_parallel}: "
            "adapters are not split over ranks; choose one of them"
        )
    for name in ("encoder_budget", "encoder_cache_size"):
        if config.max_item_embeds > getattr(config, name) > 0:
            yield (
                f"max_item_embeds {config.max_item_embeds} is larger than {name} {getattr(config, name)}: "
                f"such an item could never be encoded; raise {name} or lower max_item_embeds"
            )


def _block_store(config: EngineSettings) -> Iterator[str]:
    """Yield errors for settings that exclude a block store."""
    if not config.block_store:
        return
    if not config.block_store_path:
        yield f"block_store {config.block_store} needs a place: set block_store_path"
    if config.num_state_slots:
        yield (
            "block_store stores only KV blocks, and this model also needs recurrent states; set no "
            "block_store"
        )
    if config.compat:
        yield f"block_store cannot go with compat {config.compat}, which has none; choose one of them"
    if config.tensor_parallel > 1:
        yield (
            f"block_store keeps whole blocks, and tensor_parallel {config.tensor_parallel} cuts them over "
            "ranks; choose one of them"
        )
    if not config.enable_prefix_caching:
        yield "block_store fetches prefixes, and enable_prefix_caching is off; set it, or no block_store"


def _model_rules(config: ModelSettings) -> Iterator[str]:
    """Yield errors for settings that contradict a model's rules (atomic_runs, whole_prompt)."""
    rules = [name for name in ("atomic_runs", "whole_prompt") if getattr(config, name)]
    if not rules:
        return
    if config.compat:
        yield f"compat {config.compat} does not know {rules[0]}, which this model needs; choose no compat"
    if config.num_state_slots:
        yield f"{rules[0]} cannot go with recurrent states (num_state_slots {config.num_state_slots})"
    if config.lookahead_tokens:
        yield (
            f"lookahead_tokens {config.lookahead_tokens} reads tokens of the next chunk, which {rules[0]} "
            "does not allow; choose a drafter without a KV cache, such as ngram"
        )
    if config.block_store:
        yield f"block_store stores blocks of any prefix, which {rules[0]} does not allow; set no block_store"
    if config.whole_prompt and config.encoder_piece:
        yield (
            f"encoder_piece {config.encoder_piece} encodes images over several steps, and whole_prompt needs "
            "all of them in one; set encoder_piece 0"
        )


def _block_groups(config: ModelSettings) -> Iterator[str]:
    """Yield errors for invalid block groups, and for settings that exclude block groups."""
    if not config.block_groups:
        return
    if config.compat:
        yield (
            f"block_groups cannot go with compat {config.compat}: vLLM's rules for several KV groups only "
            "derive recorded logs; set no compat"
        )
    elif (problem := groups_problem(config.block_groups)) is not None:
        yield f"block_groups cannot be used: {problem}"
    for name in ("num_state_slots", "lookahead_tokens", "swap_blocks", "block_store"):
        if value := getattr(config, name):
            yield f"block_groups cannot go with {name} {value}, which needs one block table a row"


def _own_scheduler(config: EngineSettings) -> Iterator[str]:
    """Yield errors for settings that mmengine's own scheduler does not support."""
    if config.token_budget < config.block_size:
        yield (
            f"token_budget {config.token_budget} is smaller than block_size {config.block_size}, one block; "
            "raise token_budget or lower block_size"
        )
    if config.token_budget <= config.num_draft_tokens:
        yield (
            f"num_draft_tokens {config.num_draft_tokens} and the token before them never fit token_budget "
            f"{config.token_budget}; lower num_draft_tokens or raise token_budget"
        )
    if config.split_media:
        return
    for name in ("token_budget", "long_prefill_token_threshold"):
        if 0 < getattr(config, name) < config.largest_item:
            yield (
                f"{name} {getattr(config, name)} is smaller than an item of {config.largest_item} embeddings "
                f"that split_media=false computes at once; raise {name}, set a smaller max_item_embeds, "
                "or split media"
            )


def _vllm_scheduler(config: EngineSettings) -> Iterator[str]:
    """Yield errors for settings that vLLM's scheduler does not support."""
    if config.policy not in ("fcfs", "priority"):
        yield (
            f"compat vllm knows the policies fcfs and priority, not {config.policy}; choose one of them, or "
            "no compat"
        )
    if config.encoder_piece:
        yield (
            f"compat vllm encodes each item in one step, but encoder_piece is {config.encoder_piece}; choose "
            "one of them"
        )
    if config.swap_blocks:
        yield f"compat vllm has no host pool, but swap_blocks is {config.swap_blocks}; choose one of them"
    if config.admission_reserve == "output":
        yield "compat vllm has no admission_reserve output; use none or prompt, or no compat"
