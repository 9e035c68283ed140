"""Reads a simulation's settings: EngineConfig's fields, and settings that only scenario files have."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from mmengine.config import ENCODER_CACHE, EngineConfig
from mmengine.core.state.policy import policy_of
from mmengine.errors import ConfigError
from mmengine.simulation.simulated_executor import CostModel
from mmengine.simulation.workload import Workload

# An 8B model in bf16 on a GPU with 80 GiB and 3 TB/s. Weights and activations leave 50 GiB for KV. The KV of
# one token takes 36 layers x 8 heads x 128 values x 2 (key and value) x 2 bytes.
KV_TOKENS = 50 * 2**30 // (36 * 8 * 128 * 2 * 2)
COST_8B = CostModel(step_ns=6_000_000, token_ns=27_000, context_ns=50, embed_ns=15_000)
ROWS, TOKEN_BUDGET = 256, 8192
MAX_LORAS = 8  # default of max_loras for workloads with adapters

# Scenario settings that have another name in EngineConfig: name in a scenario -> field.
_NAMES = {"max_num_batched_tokens": "token_budget", "num_spec_tokens": "num_draft_tokens"}
_DRAFTERS = ("ngram", "eagle3")


_Price = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class _Cost(msgspec.Struct, forbid_unknown_fields=True):
    """The setting `cost`: CostModel's fields. The defaults fit an 8B model."""

    step_ns: _Price = COST_8B.step_ns
    token_ns: _Price = COST_8B.token_ns
    context_ns: _Price = COST_8B.context_ns
    embed_ns: _Price = COST_8B.embed_ns


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    """Scenario settings that are converted to EngineConfig fields."""

    num_blocks: int | None = None
    max_model_len: int | None = None
    encoder_compute_budget: int | None = None
    encoder_cache_size: int | None = None
    max_tokens_per_mm_item: int = 0
    disable_chunked_mm_input: bool | None = None
    reserve_full_prompt: bool | None = None
    spec_method: str | None = None
    scheduler: str = "sync"
    cost: _Cost = msgspec.field(default_factory=_Cost)


@dataclass(frozen=True, slots=True)
class Settings:
    config: EngineConfig
    cost: CostModel


def read_settings(given: dict[str, Any], workload: Workload, compat: str = "") -> Settings:
    """Read the settings. Raises ConfigError for an unknown key, a wrong type, or settings that conflict.

    By default, max_model_len fits the workload's longest request, and the block pool is as large as for an 8B
    model on a GPU with 80 GiB.
    """
    given = dict(given)
    try:
        words = msgspec.convert(
            {name: given.pop(name) for name in _Words.__struct_fields__ if name in given}, _Words
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings cannot be read: {error}") from None
    for theirs, ours in _NAMES.items():
        if theirs in given:
            _refuse_both(given, theirs, ours)
            given[ours] = given.pop(theirs)
    fields = {**_defaults(workload), **given, **_translated(words, given, workload)}
    config = EngineConfig.from_dict({**fields, "compat": compat})
    config.check_resolved()
    policy_of(config)  # raises ConfigError for an unknown policy before a log is created
    return Settings(config, CostModel(**msgspec.structs.asdict(words.cost)))


def _defaults(workload: Workload) -> dict[str, Any]:
    most_media = max((len(each.media) for each in workload.requests), default=0)
    return {
        "max_num_seqs": ROWS,
        "token_budget": TOKEN_BUDGET,
        "max_waiting": 2**20,
        "max_loras": MAX_LORAS if workload.adapters else 0,
        "max_media_per_request": max(EngineConfig().max_media_per_request, most_media),
    }


def _translated(words: _Words, given: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Return the EngineConfig fields for scenario settings."""
    fields: dict[str, Any] = {}
    block_size = given.get("block_size", EngineConfig().block_size)
    if not isinstance(block_size, int) or block_size < 1:
        raise ConfigError(f"block_size must be a positive integer, not {block_size!r}")
    usable = KV_TOKENS // block_size if words.num_blocks is None else words.num_blocks
    longest = workload.longest if words.max_model_len is None else words.max_model_len
    fields["num_blocks"] = usable + 1  # plus the dummy block
    fields["max_model_len"] = min(longest, usable * block_size)
    if words.encoder_compute_budget is not None:
        _refuse_both(given, "encoder_compute_budget", "encoder_budget")
    budget = words.encoder_compute_budget or given.get("encoder_budget", EngineConfig().encoder_budget)
    cache = words.encoder_cache_size or ENCODER_CACHE
    fields["encoder_budget"] = max(budget, words.max_tokens_per_mm_item)
    fields["encoder_cache_size"] = max(cache, words.max_tokens_per_mm_item)
    if words.disable_chunked_mm_input is not None:
        _refuse_both(given, "disable_chunked_mm_input", "split_media")
        fields["split_media"] = not words.disable_chunked_mm_input
    if not fields.get("split_media", given.get("split_media", True)):
        largest = max(words.max_tokens_per_mm_item, workload.largest_item)
        largest = min(largest, fields["encoder_budget"], fields["encoder_cache_size"])
        fields["max_item_embeds"] = given.get("max_item_embeds", largest)
    if words.reserve_full_prompt is not None:
        _refuse_both(given, "reserve_full_prompt", "admission_reserve")
        fields["admission_reserve"] = "prompt" if words.reserve_full_prompt else "none"
    if words.spec_method is not None:
        _refuse_both(given, "spec_method", "lookahead_tokens")
        if words.spec_method not in _DRAFTERS:
            raise ConfigError(f"spec_method must be one of {', '.join(_DRAFTERS)}, not {words.spec_method!r}")
        fields["lookahead_tokens"] = given.get("num_draft_tokens", 0) if words.spec_method == "eagle3" else 0
    if words.scheduler != "sync":
        raise ConfigError(f"scheduler must be 'sync', not {words.scheduler!r}")
    return fields


def _refuse_both(given: dict[str, Any], theirs: str, ours: str) -> None:
    if ours in given:
        raise ConfigError(f"{theirs} and {ours} set the same thing; give one of them")
