"""Writes the output of `mmengine log minimize`: the smallest log, and a pytest file that replays this log.

The names and texts in a log are untrusted, so only their plain characters are written to the Python file.
"""

import re
import secrets
import shutil
from pathlib import Path

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.minimize.failures import Failure
from mmengine.replay.minimize.probe import Probe
from mmengine.replay.rerun.script import Script, read_script

_HEAD = '''"""{title}

{what}

Minimized by `mmengine log minimize` from {before} requests to {after}:

{table}
"""

'''
_TEST = """from pathlib import Path

{imports}

def test_{name}():
    log = Path(__file__).with_name("log")
{body}
"""


def refuse_used(folder: Path) -> None:
    """Raise LogError if the folder is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LogError(f"{folder} is not empty; name another folder")


def reproduce(script: Script, failure: Failure, probe: Probe, folder: Path, before: int) -> Path:
    """Write the log to `folder`/log, write the test, and return the test's path. `before`: the number of
    requests in the original log.

    The folder is created either completely or not at all. Raises LogError if the folder is not empty, or if
    the written log does not reproduce the failure.
    """
    refuse_used(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        name = _written(script, failure, probe, beside, before)
        beside.rename(folder)  # At this point, the target folder is missing or empty.
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return folder / name


def _written(script: Script, failure: Failure, probe: Probe, folder: Path, before: int) -> str:
    """Write the log and the test to this folder, and return the test's name."""
    log = folder / "log"
    probe.write(script, log)
    found = probe.of_log(log)
    if found is None or found.signature != failure.signature:
        raise LogError(f"the written log does not fail like the whole log: {found or 'it does not fail'}")
    test = probe.test(found)
    text = _HEAD.format(
        title=test.title,
        what=_plain(found.what if found.step < 0 else f"First seen at step {found.step}: {found.what}"),
        before=before,
        after=len(script.requests),
        table="\n".join(_table(read_script(log))),
    )
    text += test.module or _TEST.format(imports=test.imports, name=test.name, body=test.body)
    name = f"test_minimized_{test.name}.py"
    (folder / name).write_text(text)
    return name


def _table(script: Script) -> list[str]:
    lines = ["    step  request         prompt  answer  media (first embedding, how many)"]
    for each in script.observations:
        event = each.event
        if not isinstance(event, ev.Queued):
            lines.append(
                f"    {each.step:>4}  {_plain(getattr(event, 'request_id', '')):<14}  {type(event).__name__}"
            )
            continue
        runs = ", ".join(f"({start}, {size})" for item in event.media for start, size in item.runs)
        line = f"    {each.step:>4}  {_plain(event.request_id):<14}  {len(event.prompt) // 4:>6}  "
        lines.append(f"{line}{event.sampling.max_tokens:>6}  {runs}".rstrip())
    return lines


def _plain(text: str) -> str:
    return re.sub(r"[^\w .,:;()#+/=-]", "?", text, flags=re.ASCII)[:160]
