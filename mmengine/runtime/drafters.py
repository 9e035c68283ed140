"""Who drafts, by what `spec` says, and the settings that this needs."""

from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.loader import resolve_folder
from mmengine.models.plugin import ModelSpec
from mmengine.spec_decode.base import Drafter
from mmengine.spec_decode.eagle3.config import MAX_DRAFTS, Target
from mmengine.spec_decode.eagle3.loading import HeadFolder, open_head
from mmengine.spec_decode.grammar import GrammarDrafter
from mmengine.spec_decode.registry import free_drafter
from mmengine.structured_output.grammars import Grammars
from mmengine.structured_output.rows import RowMatchers

DRAFT_TOKENS = 8  # of one row, where the settings do not say
HEADS = "mmengine.draft_heads"  # entry points: the folder of the embedded checkpoint's own head
HEAD = "eagle3"


def head_folder(config: EngineConfig, spec: ModelSpec, model: Path) -> HeadFolder | None:
    """The head that `spec` asks for beside the checkpoint in `model`, read and checked; None for no head.
    Raises ConfigError, ModelError."""
    name, given, path = config.spec.partition("=")
    if name != HEAD:
        return None
    if given:
        folder = Path(path)
    else:
        points = list(entry_points(group=HEADS))
        if not points or model.resolve() != resolve_folder(None).resolve():
            raise ConfigError(f"{model} has no draft head of its own; name a folder: spec {HEAD}=PATH")
        folder = points[0].load()()
    target = Target(spec.hidden_size, spec.vocab_size, spec.num_layers)
    return open_head(folder, target, num_drafts=config.num_draft_tokens or None)


def with_drafts(config: EngineConfig, head: HeadFolder | None) -> EngineConfig:
    """`config` with the drafts a row, and the slots behind its tokens that a head writes, filled in. Raises
    ConfigError for settings that contradict `spec`."""
    if config.lookahead_tokens and head is None:
        raise ConfigError(f"lookahead_tokens needs a drafter that keeps KV, such as spec {HEAD}")
    if config.spec == "none":
        if config.num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens {config.num_draft_tokens} needs a drafter, and spec is none; set "
                "spec auto, or no num_draft_tokens"
            )
        return config
    if config.max_in_flight > 1 or config.compat:
        if config.spec != "auto":
            raise ConfigError(f"spec {config.spec} cannot go with max_in_flight 2 or compat; set spec none")
        return config
    if head is None:
        most = config.num_draft_tokens or min(DRAFT_TOKENS, config.token_budget - 1)
        return msgspec.structs.replace(config, num_draft_tokens=most)
    most = min(head.config.num_drafts, config.token_budget - 1)
    return msgspec.structs.replace(config, num_draft_tokens=most, lookahead_tokens=most)


def make_drafters(
    config: EngineConfig, head: HeadFolder | None, matchers: RowMatchers, grammars: Grammars
) -> list[Drafter]:
    """Those that need no device, the preferred ones first. Raises ConfigError for one that nobody knows, and
    for a head where the log that is continued was written without."""
    if head is not None:
        if not 0 < config.num_draft_tokens <= min(MAX_DRAFTS, config.lookahead_tokens):
            raise ConfigError(f"the log was begun without a draft head; go on with spec auto, not {HEAD}")
        return []
    if not config.num_draft_tokens or config.spec == "none":
        return []
    if config.spec in ("auto", "grammar"):
        return [GrammarDrafter(matchers.forced)]
    return [free_drafter(config.spec)(config.max_num_seqs)]
