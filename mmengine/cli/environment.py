"""Warns about unknown environment variables that begin with MMENGINE_."""

import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import get_args

PREFIX = "MMENGINE_"
# Known variables that set no option of `mmengine serve`.
OTHERS = frozenset(
    PREFIX + name
    for name in (
        *("ADMIN_KEY", "API_KEY", "CACHE", "HUB", "SSL_KEYFILE_PASSWORD"),
        *("NATIVE", "NATIVE_ISA", "NATIVE_TIMEOUT_S", "WHEEL_ISAS"),
        # mmengine's processes set these variables for one another.
        *("BEATS", "CRASH_FILE", "ENDED_BY", "IN_HASTE", "SOCKET", "SUPERVISED_BY"),
        # The plugin for vLLM reads these variables.
        *("LOG", "LOG_BYTES", "LOG_CONTENT", "LOG_RING_SECONDS", "STALL_SECONDS"),
    )
)
# Kubernetes sets variables with these names for a service called mmengine.
_SERVICE_LINK = re.compile(PREFIX + r"(?:SERVICE_(?:HOST|PORT).*|PORT_\d+_.*)")
MAX_NAMED = 10  # Maximum number of variables that the warning names.


def unknown_variables(names: Iterable[str]) -> str:
    """Return a warning about the unknown MMENGINE_ variables in `names`, or "" if there are none."""
    own = sorted(name for name in names if name.startswith(PREFIX) and name not in OTHERS)
    own = [name for name in own if not _SERVICE_LINK.fullmatch(name)]
    if not own:
        return ""
    known = OTHERS | _option_variables()  # Slow: loads the options of `serve`.
    unknown = [name for name in own if name not in known]
    if not unknown:
        return ""
    said = [_with_advice(name, known) for name in unknown[:MAX_NAMED]]
    more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
    which = "this environment variable" if len(unknown) == 1 else "these environment variables"
    return f"nothing reads {which}: {', '.join(said)}{more}"


def _with_advice(name: str, known: Iterable[str]) -> str:
    from mmengine.setting_names import advice_for  # Lazy: most commands need no advice.

    setting = name.removeprefix(PREFIX).lower()
    if _is_setting(setting):
        return f"{name[:80]} (use --set {setting}=…, or {PREFIX}SET={setting}=…)"
    near = get_close_matches(name[:80], known, 1, 0.8)
    if near:
        return f"{name[:80]} (did you mean {near[0]}?)"
    advice = advice_for(setting, is_command_line=True)
    return f"{name[:80]} ({advice})" if advice else name[:80]


def _is_setting(name: str) -> bool:
    from mmengine.engine_settings import EngineSettings  # Lazy import.

    return name in EngineSettings.__struct_fields__


def _option_variables() -> frozenset[str]:
    """Return the variables that set options of `mmengine serve`."""
    from mmengine.cli.serve import serve  # Lazy import.

    options = [get_args(each.annotation) for each in inspect.signature(serve).parameters.values()]
    found = [each[1].envvar for each in options if len(each) > 1]
    return frozenset(name for name in found if isinstance(name, str))
