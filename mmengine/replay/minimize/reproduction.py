"""What `mmengine log minimize` leaves behind: the smallest log, and a pytest file that replays it.

Names and texts of a log come from anybody; only plain characters of them reach the Python file.
"""

import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from mmengine.errors import LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.invariants import INVARIANTS
from mmengine.replay.minimize.failures import IN_A_RUN, KINDS, Failure, replay_failure, write_log
from mmengine.replay.rerun.script import Script, read_script

PLACE = "{}"  # in a command, where the folder of a log belongs

_TEST = '''"""{title}

{what}

Minimized by `mmengine log minimize` from {before} requests to {after}:

{table}
"""

from pathlib import Path

{imports}

def test_{name}():
    log = Path(__file__).with_name("log")
{body}
'''
_REPLAY = """    failure = replay_failure(log, "{kind}")
    assert failure is None, failure"""
_COMMAND = """    command = [part.replace("{{}}", str(log)) for part in {command!r}]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != {code}, done.stdout + done.stderr"""


class Command:
    """A command that fails on a log: it ends with another exit code than 0. Its signature is that code
    and the last line it prints, without numbers."""

    def __init__(self, text: str):
        self.parts = shlex.split(text)
        self.code = 0
        if not self.parts or not any(PLACE in part for part in self.parts):
            raise LogError(
                f"{text!r} is neither a kind of failure ({', '.join(KINDS)}) nor a command that says with "
                f"{PLACE} where the log belongs"
            )

    def failure(self, folder: Path) -> Failure | None:
        command = [part.replace(PLACE, str(folder)) for part in self.parts]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        except OSError as error:
            raise LogError(f"{command[0]} cannot be run: {error.strerror}") from None
        if done.returncode == 0:
            return None
        self.code = done.returncode
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = (lines or [""])[-1].replace(str(folder), "LOG").strip()
        return Failure(f"exit code {done.returncode}", last[:300], -1)

    def of_script(self, script: Script, max_steps: int) -> Failure | None:
        with tempfile.TemporaryDirectory() as folder:
            write_log(script, "any", Path(folder) / "log", max_steps)
            return self.failure(Path(folder) / "log")


def reproduce(script: Script, failure: Failure, kind: str | Command, folder: Path, before: int) -> Path:
    """Write `folder`/log and the test; gives the test's path. `before`: requests of the whole log.

    Raises LogError when the folder holds something, or when what was written does not fail as it should.
    """
    if folder.exists() and any(folder.iterdir()):
        raise LogError(f"{folder} is not empty; name another folder")
    log = folder / "log"
    if isinstance(kind, Command):
        write_log(script, "any", log)
        found = kind.failure(log)
        name, imports = "command", "import subprocess\n"
        body = _COMMAND.format(command=kind.parts, code=kind.code)
    else:
        write_log(script, kind, log)
        found = replay_failure(log, kind)
        name, imports = failure.kind, "from mmengine.replay import replay_failure\n"
        body = _REPLAY.format(kind=failure.kind)
    if found is None or found.signature != failure.signature:
        raise LogError(f"the log in {log} does not fail as the whole one does: {found}")
    seen = found.what if isinstance(kind, Command) else f"First seen at step {found.step}: {found.what}"
    text = _TEST.format(
        title=_title(failure, kind),
        what=_plain(seen),
        before=before,
        after=len(script.requests),
        table="\n".join(_table(read_script(log))),
        imports=imports,
        name=name,
        body=body,
    )
    test = folder / f"test_minimized_{name}.py"
    test.write_text(text)
    return test


def _title(failure: Failure, kind: str | Command) -> str:
    if isinstance(kind, Command):
        return "A command fails on this log."
    if failure.kind in IN_A_RUN:
        return f"Serving these requests fails: {failure.kind}."
    return (INVARIANTS[failure.kind].__doc__ or "").strip()


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
