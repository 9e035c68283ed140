"""Chooses the rules for a recorded log from the version of the engine that made the decisions."""

import re
from typing import NamedTuple

from mmengine.events import vocabulary as ev

# In STARTED's `fingerprints`: features of the host that the rules here do not model, as a text.
UNMODELLED = "not_derived"
_COMPAT = {(0, 32): "vllm-0.32", (0, 33): "vllm-0.33"}
_SETTING = "vllm."
_VERSION = re.compile(r"vllm (\d+)\.(\d+)")


def is_setting(fingerprint: str, value: str) -> bool:
    """Return whether a fingerprint holds a number or a flag of the host's settings, and no text."""
    return fingerprint.startswith(_SETTING) and bool(re.fullmatch(r"True|False|[0-9.]{1,20}", value))


class HostRules(NamedTuple):
    """The rules for a log. `compat`: the setting that selects them, or "" if no rules apply. `name`: their
    name for people. `caveat`: why they may differ from the host's rules, or "".
    """

    compat: str
    name: str
    caveat: str = ""


def rules_for(started: ev.Started) -> HostRules:
    """Return the rules for the log that begins with `started`, whose `host` is not empty."""
    if missing := started.fingerprints.get(UNMODELLED, ""):
        return HostRules("", "", f"the rules here do not model {missing}")
    if changed := _changed_settings(started):
        return HostRules("", "", f"the rules here do not model {changed}")
    if not started.constants.knows_contents:
        return HostRules("", "", "the log does not tell what vLLM's prefix cache held when it began")
    found = _VERSION.match(started.host)
    if found is None:
        return HostRules("", "", f"this build has no rules of {started.host}; it has those of vllm")
    version = int(found[1]), int(found[2])
    nearest = min(_COMPAT, key=lambda known: (abs(_place(known) - _place(version)), known))
    name = f"vllm {nearest[0]}.{nearest[1]}"
    if nearest == version:
        return HostRules(_COMPAT[nearest], name)
    return HostRules(
        _COMPAT[nearest], name, f"this build has no rules of {started.host}; those of {name} are the nearest"
    )


def _changed_settings(started: ev.Started) -> str:
    """Return the settings of vLLM whose values no rule here models, as a text."""
    facts, config = started.fingerprints, started.config
    expected = {
        "hash_block_size": (str(config.get("block_size")),),
        "max_num_active_reqs": (str(config.get("max_num_seqs")),),
        "prefix_replay_tokens": ("0",),
        "num_prefill_lookahead": ("0", "1"),
        "enable_chunked_prefill": ("True",),
        "long_prefill_token_threshold_adaptive": ("False",),
        "watermark": ("0", "0.0"),
    }
    given = {name: facts.get(_SETTING + name) for name in expected}
    return ", ".join(
        f"{name} {value}"
        for name, value in given.items()
        if value is not None and value not in expected[name]
    )


def _place(version: tuple[int, int]) -> int:
    return 1000 * version[0] + version[1]
