"""Selects the decision rules with which a recorded log is verified. A recorded log contains decisions by
another engine, such as vLLM, called the host. The rules depend on the host's version.
"""

import re
from typing import NamedTuple

from mmengine.core.decide.deciders import nearest_compat
from mmengine.events import vocabulary as ev

# A key in STARTED's `fingerprints`. The value lists the host's features that mmengine's rules do not model.
UNMODELLED = "not_derived"
_SETTING = "vllm."


def is_setting(fingerprint: str, value: str) -> bool:
    """Return whether a fingerprint is a number or a flag from the host's settings."""
    return fingerprint.startswith(_SETTING) and bool(re.fullmatch(r"True|False|[0-9.]{1,20}", value))


class HostRules(NamedTuple):
    """The rules for a log. `compat`: the setting that selects the rules, or "" if no rules apply. `name`: the
    name of the rules in messages. `caveat`: why no rules apply, or why the rules may differ from the host's
    rules, or "".
    """

    compat: str
    name: str
    caveat: str = ""


def rules_for(started: ev.Started) -> HostRules:
    """Return the rules for the recorded log that begins with `started`. `started.host` must not be empty."""
    if missing := started.fingerprints.get(UNMODELLED, ""):
        return HostRules("", "", f"the rules here do not model {missing}")
    if changed := _changed_settings(started):
        return HostRules("", "", f"the rules here do not model {changed}")
    if not started.constants.knows_contents:
        return HostRules("", "", "the log does not say what vLLM's prefix cache contained when the log began")
    compat, is_equal = nearest_compat(started.host)
    if not compat:
        return HostRules("", "", f"this build has no rules of {started.host}; it only has rules of vllm")
    name = compat.replace("-", " ")
    if is_equal:
        return HostRules(compat, name)
    caveat = f"this build has no rules of {started.host}; those of {name} are the nearest"
    return HostRules(compat, name, caveat)


def _changed_settings(started: ev.Started) -> str:
    """Return a text with the vLLM settings whose values mmengine's rules do not model."""
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
    if config.get("block_groups"):  # the token budget determines how many blocks a sliding window reserves
        expected["max_num_batched_tokens"] = (str(config.get("token_budget")),)
    given = {name: facts.get(_SETTING + name) for name in expected}
    return ", ".join(
        f"{name} {value}"
        for name, value in given.items()
        if value is not None and value not in expected[name]
    )
