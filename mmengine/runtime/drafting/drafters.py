"""Creates the drafters for the setting `spec`, and fills in the settings that the drafters need."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.models.loader import resolve_folder
from mmengine.models.mtp.files import MtpHead
from mmengine.models.plugin import ModelPlugin, ModelSpec, VisionLanguageModel
from mmengine.native import library as native
from mmengine.native.decoder_weights import fits
from mmengine.registry import entry_points
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.drafting.eagle3.loading import load_head
from mmengine.runtime.drafting.head.network import HeadNetwork
from mmengine.runtime.drafting.mtp.head import DEFAULT_DRAFTS, MtpFiles, load_mtp_head
from mmengine.spec_decode.base import Drafter
from mmengine.spec_decode.eagle3.config import MAX_DRAFTS, Target
from mmengine.spec_decode.eagle3.loading import HeadFolder, open_head
from mmengine.spec_decode.grammar import GrammarDrafter
from mmengine.spec_decode.registry import DRAFTERS
from mmengine.structured_output.rows.rows import RowMatchers

# Default numbers of drafts per row. DRAFT_TOKENS: without a draft head. HYBRID_TOKENS: with a draft head that
# continues a grammar's drafts.
DRAFT_TOKENS, HYBRID_TOKENS = 8, 15
# Entry points in this group return the folder with the draft head for mmengine's default checkpoint.
HEADS = "mmengine.draft_heads"
HEAD, MTP, GRAMMAR, AUTO = "eagle3", "mtp", "grammar", "auto"
HEADS_BY_NAME = (HEAD, MTP)

AnyHead = HeadFolder | MtpFiles

log = structlog.get_logger("mmengine.operators")


def find_head(
    config: EngineConfig, spec: ModelSpec, plugin: ModelPlugin, model: Path, placement: Placement
) -> AnyHead | None:
    """Return the draft head that the setting `spec` selects for the checkpoint in `model`, or None.

    The files of the head have been read and checked. Raises ConfigError or ModelError.
    """
    name, given, path = config.spec.partition("=")
    if name not in (*HEADS_BY_NAME, AUTO):
        return None
    target = Target(spec.hidden_size, spec.vocab_size, spec.num_layers)
    if name == AUTO:
        return _automatic_head(config, target, plugin, model, placement)
    if name == MTP:
        return _mtp_head(config, plugin, model, is_path_given=bool(given))
    folder = Path(path) if given else _own_head(model)
    if folder is None:
        raise ConfigError(f"{model} has no draft head; name a head's folder with spec {HEAD}=PATH")
    return open_head(folder, target, num_drafts=config.num_draft_tokens or None)


def _mtp_head(config: EngineConfig, plugin: ModelPlugin, model: Path, *, is_path_given: bool) -> MtpFiles:
    """Return the checkpoint's multi-token-prediction head. Raises ConfigError or ModelError."""
    if is_path_given:
        raise ConfigError(
            f"spec {config.spec} is not supported: the head is in the model's files; set spec {MTP}"
        )
    if config.tensor_parallel > 1:
        raise ConfigError(f"spec {MTP} is not supported with tensor_parallel; set spec none")
    if config.num_draft_tokens > MAX_DRAFTS:
        raise ConfigError(f"num_draft_tokens {config.num_draft_tokens} exceeds a head's limit {MAX_DRAFTS}")
    head = _plugin_head(plugin, model)
    if head is None:
        raise ConfigError(f"{model} has no multi-token-prediction head (tensors mtp.*); set spec auto")
    return MtpFiles.of(head, config.num_draft_tokens or DEFAULT_DRAFTS)


def _plugin_head(plugin: ModelPlugin, model: Path) -> MtpHead | None:
    find: Callable[[Path], MtpHead | None] | None = getattr(plugin, "draft_head", None)
    return None if find is None else find(model)


def _own_head(model: Path) -> Path | None:
    points = list(entry_points(group=HEADS))
    if not points or model.resolve() != resolve_folder(None).resolve():
        return None
    return points[0].load()()


def _automatic_head(
    config: EngineConfig, target: Target, plugin: ModelPlugin, model: Path, placement: Placement
) -> AnyHead | None:
    """Return the checkpoint's draft head if the native kernels support it, else None.

    A problem with the head is not an error, because the user did not request the head.
    """
    if config.compat or config.tensor_parallel > 1:
        return None
    try:
        if native.load() is None:
            return None
        folder, num_drafts = _own_head(model), min(config.num_draft_tokens or MAX_DRAFTS, MAX_DRAFTS)
        head: AnyHead
        if folder is not None:
            head = open_head(folder, target, num_drafts=num_drafts)
        else:
            own = _plugin_head(plugin, model)
            if own is None:
                return None
            head = MtpFiles.of(own, num_drafts)
        device = placement.device.torch_device
        return head if fits(head.config.head_dim, device, placement.dtype) else None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        log.warning("the checkpoint's draft head is not used; spec auto continues without it", reason=reason)
        return None


def load_any_head(
    head: AnyHead, config: EngineConfig, model: VisionLanguageModel, placement: Placement
) -> HeadNetwork:
    """Load the weights of a checked head. Raises ModelError."""
    if isinstance(head, MtpFiles):
        return load_mtp_head(head, model, placement, config.quantize, config.activations)
    return load_head(head, model, placement)


def with_drafts(config: EngineConfig, head: AnyHead | None) -> EngineConfig:
    """Return `config` with values for `num_draft_tokens` and `lookahead_tokens` (KV slots that a draft head
    needs after a row's tokens).

    Raises ConfigError for settings that contradict the setting `spec`.
    """
    if config.lookahead_tokens and head is None:
        raise ConfigError(f"lookahead_tokens needs a drafter that keeps KV, such as spec {HEAD}")
    if config.spec == "none":
        if config.num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens {config.num_draft_tokens} needs a drafter, but spec is none; set "
                "spec auto, or remove num_draft_tokens"
            )
        return config
    if config.compat:
        if config.spec != AUTO:
            raise ConfigError(f"spec {config.spec} is not supported with compat; set spec none")
        return config
    if head is None or config.spec == AUTO:
        suggested = DRAFT_TOKENS if head is None else HYBRID_TOKENS
        most = config.num_draft_tokens or min(suggested, config.token_budget - 1)
    else:
        most = min(head.config.num_drafts, config.token_budget - 1)
    forms = head is None and config.spec in (AUTO, GRAMMAR)
    return msgspec.structs.replace(
        config,
        num_draft_tokens=most,
        lookahead_tokens=most if head else 0,
        drafts_for="forms" if forms else config.drafts_for,
    )


def head_for(config: EngineConfig, head: AnyHead | None) -> AnyHead | None:
    """Return `head` if `config` reserves KV slots for the head, else None. `config` reserves none if it comes
    from a continued log that was started without a head.

    Raises ConfigError if there are no slots although the user requested the head.
    """
    if head is None or 0 < config.num_draft_tokens <= config.lookahead_tokens:
        return head
    if config.spec != AUTO:
        raise ConfigError(
            f"the log was started without a draft head; continue with spec auto, not {config.spec}"
        )
    return None


def make_drafters(config: EngineConfig, matchers: RowMatchers) -> list[Drafter]:
    """Return the drafters that compute on the host, the preferred drafter first.

    Raises ConfigError for an unknown name.
    """
    if not config.num_draft_tokens or config.spec == "none" or config.spec.partition("=")[0] in HEADS_BY_NAME:
        return []
    if config.spec in (AUTO, GRAMMAR):
        return [GrammarDrafter(matchers.forced)]
    return [DRAFTERS.load(config.spec)(config.max_num_seqs)]
