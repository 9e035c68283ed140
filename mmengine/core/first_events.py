"""Creates the log events STARTED (an engine's settings) and QUEUED (an accepted request)."""

from msgspec.structs import replace

from mmengine.config import EngineConfig
from mmengine.core.decide.deciders import nearest_compat, scheduler_of
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.state.request_state import queued_of
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.events.codec import as_logged
from mmengine.request import Request
from mmengine.version import __version__


def queued_as_logged(request: Request) -> ev.Queued:
    """Return the request's QUEUED event as a reader of the log would decode the event. Raises InvalidRequest
    for a value that a log cannot contain.
    """
    try:
        return as_logged(queued_of(request))
    except ValueError as error:
        raise InvalidRequest(f"request {request.request_id!r} cannot be written to a log: {error}") from None


def started_of(
    config: EngineConfig, fingerprints: dict[str, str], is_host_driven: bool = False, host: str = ""
) -> ev.Started:
    """Return STARTED for a new log.

    `host`: name of the engine whose scheduler decides, such as vLLM; "" for this engine's scheduler.
    """
    return ev.Started(
        schema=ev.SCHEMA_VERSION,
        engine_version=__version__,
        decision_version=DECISION_VERSION,
        config=config.as_dict(),
        fingerprints=fingerprints,
        num_blocks=config.num_blocks,
        constants=constants_of(config, host),
        is_host_driven=is_host_driven,
        host=host,
    )


def constants_of(config: EngineConfig, host: str = "") -> ev.FoldConstants:
    """Return the constants for applying the events of a log.

    `host`: as in `started_of`. If the setting `compat` is "vllm" without a version, `host` selects the
    version.
    """
    if not host:
        return scheduler_of(config).constants(config.lookahead_tokens)
    compat: str = config.compat
    if compat == "vllm":
        compat = nearest_compat(host)[0] or compat
    constants = scheduler_of(replace(config, compat=compat)).constants(config.lookahead_tokens)
    overlaps = config.max_in_flight > 1
    return replace(
        constants,
        # No salt is needed, because vLLM's media identifiers cover everything that affects an encoder output.
        salts_media=False,
        is_asynchronous=overlaps,
        fills_with_results=overlaps or (config.num_draft_tokens > 0 and compat != "vllm-0.32"),
    )
