"""Tests that the log commands run on a laptop with only the base dependencies, and print the same text as in
the full environment.

The code in `SYSTEM` makes Python resemble Windows: it removes modules and functions that Windows lacks, and
replaces the file locks.
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mmengine.events.log import LogWriter
from mmengine.extras import ENGINE_MODULES
from tests.cli.cli_process import call_cli

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "mixed"
COMMANDS = (
    "simulate examples/shared_images.json --log LOG --decisions LOG.jsonl",
    "log verify LOG GOLDEN",
    "log show LOG --steps --limit 3",
    "log show LOG --step 20",
    "log show LOG --at 20",
    "log why LOG dan",
    "log diff LOG LOG",
    "log redact LOG LOG.public",
    "log export LOG --csv",
    "log export LOG --perfetto -o LOG.trace",
    "log rerun LOG --set max_waiting=65",
    "log report LOG -o LOG.html",
    """log minimize LOG --failing "sh -c '! grep -qra dan {}'" -o LOG.small""",
    "log verify LOG.small/log",
    "log fsck LOG",
)
PROGRAM = """
import contextlib, io, json, sys

folder, commands, system = json.loads(sys.argv[1])
sys.path.insert(0, folder)
exec(system)
from mmengine.cli.main import main

for arguments in commands:
    sys.argv = ["mmengine", *arguments]
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue()]))
heavy = ("torch", "transformers", "tokenizers", "av", "PIL")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
# `locking` replaces flock and works as on Windows: only one descriptor can lock a file, and closing the
# descriptor releases the lock.
SYSTEM = """
import fcntl, os, types
# Imported first: these modules look at the system's features.
import getpass, random, shutil, subprocess, tempfile, uuid

msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK, flock = 2, fcntl.flock
def locking(fd, mode, num_bytes):
    assert mode == msvcrt.LK_NBLCK and num_bytes == 1 and os.lseek(fd, 0, os.SEEK_CUR) == 0
    flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
msvcrt.locking = locking
sys.modules |= {"msvcrt": msvcrt}
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios"))
room = shutil.disk_usage(".")
shutil.disk_usage, shutil._use_fd_functions = lambda path: room, False
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "fdatasync", "statvfs", "pread", "pwrite",
             "posix_fallocate", "fork", "fchmod", "getuid", "geteuid", "sched_getaffinity"):
    delattr(os, name)
def opened(path, *rest, real=os.open, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return real(path, *rest, **options)
os.open = opened
"""
LOCKS = """
from pathlib import Path
from mmengine.errors import LogError
from mmengine.events import lock
from mmengine.events.log import LogWriter

folder = Path(sys.argv[2])
assert lock.is_locked(folder / "held") and not lock.is_locked(folder / "free")
writer = LogWriter(folder / "free")
for attempt in lambda: LogWriter(folder / "free"), lambda: LogWriter(folder / "held", reopen="tail"):
    try:
        attempt()
    except LogError as error:
        assert "another process is writing" in str(error)
    else:
        raise AssertionError("two writers")
assert lock.is_locked(folder / "free")
writer.close()
assert not lock.is_locked(folder / "free")

busy = iter([True, True, False])  # another process checks the lock, which it holds for a moment
def asked(fd, *rest, real=msvcrt.locking):
    if next(busy):
        raise OSError(36, "Resource deadlock avoided")
    real(fd, *rest)
msvcrt.locking = asked
assert not lock.is_locked(folder / "free")
msvcrt.locking = locking

(folder / "free" / "lock").unlink()
(folder / "free" / "lock").symlink_to(folder / "held" / "lock")
try:
    LogWriter(folder / "free", reopen="tail")
except LogError as error:
    print(error)
"""


def requirements(names):
    """Return the named distributions and all their dependencies, by name."""
    found = {}
    for name in names:
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                found |= requirements([needed.name])
        found[name] = metadata.distribution(name)
    return found


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    """Return a folder for sys.path that contains only mmengine, its plugins and the base dependencies."""
    folder = tmp_path_factory.mktemp("laptop")
    base = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for distribution in requirements(Requirement(text).name for text in base).values():
        for name in {Path(file).parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            (folder / name).symlink_to(distribution.locate_file(name))
    for package in (ROOT / "mmengine", *(ROOT / "plugins").glob("mmengine_*")):
        (folder / package.name).symlink_to(package)
    return folder


def words_of(commands, folder):
    names = {"LOG": str(folder / "log"), "GOLDEN": str(GOLDEN), "examples/": f"{ROOT}/examples/"}
    for command in commands:
        for name, path in names.items():
            command = command.replace(name, path)
        yield shlex.split(command)


def run_there(laptop, code, *arguments, timeout=120):
    command = [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={"COLUMNS": "110"})
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Run the commands in the full environment, and return their folder and their results."""
    folder = tmp_path_factory.mktemp("here")
    said = [call_cli(*words, env={"COLUMNS": "110"}) for words in words_of(COMMANDS, folder)]
    return folder, said


@pytest.mark.parametrize("system", ["", SYSTEM], ids=["no torch", "as on Windows"])
def test_commands_print_the_same_there(laptop, here, tmp_path, system):
    commands = list(words_of(COMMANDS, tmp_path))
    done = run_there(laptop, PROGRAM, json.dumps([str(laptop), commands, system]))
    *said, loaded = map(json.loads, done.stdout.splitlines())
    assert loaded == [] and "Traceback" not in done.stderr
    for command, (code, printed), expected in zip(COMMANDS, said, here[1], strict=True):
        assert code == 0 and "1 of 2 logs" not in printed, (command, done.stderr)
        same = re.sub(r"in \d+\.\d s", "in time", printed.replace(str(tmp_path), str(here[0])))
        assert (code, same) == (expected.returncode, re.sub(r"in \d+\.\d s", "in time", expected.stdout)), (
            command
        )
    (segment,) = (tmp_path / "log").glob("*.mmlog")
    assert segment.read_bytes() == (here[0] / "log" / segment.name).read_bytes()


def test_commands_without_the_engine_say_how_to_install_the_engine(laptop, tmp_path):
    program = PROGRAM.replace("contextlib.redirect_stdout(out)", "contextlib.redirect_stderr(out)")
    schema = str(ROOT / "examples" / "shapes.schema.json")
    commands = (["run", "hello"], ["demo", "--folder", str(tmp_path)], ["env"], ["schema", "check", schema])
    done = run_there(laptop, program, json.dumps([str(laptop), commands, ""]))
    *outcomes, loaded = map(json.loads, done.stdout.splitlines())
    assert loaded == [] and [code for code, _ in outcomes] == [2] * len(commands)
    for _, message in outcomes:
        assert message.count("\n") == 1 and "pip install '.[engine]' from a checkout" in message
    begin = f"import sys\nsys.path.insert(0, {str(laptop)!r})\nimport mmengine\n"
    failed = run_there(
        laptop, begin + "try: mmengine.Engine\nexcept ModuleNotFoundError as error: print(error)"
    )
    assert failed.stdout.startswith("mmengine.Engine cannot be imported: ") and "'.[engine]'" in failed.stdout


def test_hints_name_the_engine_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {Requirement(text).name.lower() for text in project["optional-dependencies"]["engine"]}
    owners_of = metadata.packages_distributions()
    brought = {module for module, owners in owners_of.items() if needed & {each.lower() for each in owners}}
    assert brought >= ENGINE_MODULES


def test_a_windows_lock_excludes_the_same_processes(laptop, tmp_path):
    held = LogWriter(tmp_path / "held")
    LogWriter(tmp_path / "free").close()
    begin = f"import json, sys\nsys.path.insert(0, {str(laptop)!r})\n"
    done = run_there(laptop, begin + SYSTEM + LOCKS, "", tmp_path)
    assert "no log can be written in" in done.stdout and "symbolic links" in done.stdout
    held.close()
