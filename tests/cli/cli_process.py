"""Runs the mmengine command in this process or in a separate process."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.cli import supervisor
from mmengine.cli.main import main

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "PIL", "av", "tokenizers", "llguidance", "xgrammar")


def call_cli(*arguments, env=None, cwd=None) -> subprocess.CompletedProcess:
    """Run the command in this process and return its exit code and its output, including output from native
    code. `env`: the command's complete environment. Process-wide settings are restored afterwards.
    """
    torch, structlog = (sys.modules.get(name) for name in ("torch", "structlog"))
    # Remove pytest's handlers, which a separate process would not have.
    handlers, logging.root.handlers = logging.root.handlers, []
    before = sys.argv, dict(os.environ), os.getcwd(), torch and torch.get_num_threads()
    sys.argv = ["mmengine", *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            _set_environment(before[1] if env is None else env)
            os.chdir(cwd or before[2])
            with _streams(out, err):
                code = _exit_code()
        finally:
            logging.root.handlers = handlers
            sys.argv = before[0]
            _set_environment(before[1])
            os.chdir(before[2])
            if torch:
                torch.set_num_threads(before[3])
            if structlog:
                structlog.reset_defaults()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(["mmengine", *arguments], code, *texts)


def run_unsupervised(monkeypatch) -> None:
    """Let commands run in this process, which has imported torch, instead of in a supervised process."""

    def run_here(arguments, progress):
        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "is_supervised", lambda: True)
            patch.setattr(supervisor, "obey_supervisor", lambda: None)
            return _exit_code()

    monkeypatch.setattr(supervisor, "supervise", run_here)


def _exit_code() -> int:
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _set_environment(values) -> None:
    os.environ.clear()
    os.environ.update(values)


@contextmanager
def _streams(*files) -> Iterator[None]:
    """Redirect file descriptors 1 and 2, sys.stdout and sys.stderr to `files`."""
    kept = sys.stdout, sys.stderr
    for stream in kept:
        stream.flush()
    copies = [os.dup(fd) for fd in (1, 2)]
    for fd, file in zip((1, 2), files):
        os.dup2(file.fileno(), fd)
    try:
        with (
            open(1, "w", encoding="utf-8", closefd=False) as sys.stdout,
            open(2, "w", encoding="utf-8", closefd=False) as sys.stderr,
        ):
            yield
    finally:
        sys.stdout, sys.stderr = kept
        for fd, copy in zip((1, 2), copies):
            os.dup2(copy, fd)
            os.close(copy)


def run_cli(*arguments, blocked=(), env=None, cwd=None):
    """Run the command in a separate process and report which heavy modules it imported."""
    code = (
        "import sys\n"
        f"for name in {list(blocked)!r}: sys.modules[name] = None\n"
        "import atexit\n"
        f"heavy = {[*HEAVY, 'numpy', 'rich.console']!r}\n"
        "found = lambda: [name for name in heavy if sys.modules.get(name)]\n"
        "atexit.register(lambda: print('LOADED', found(), file=sys.stderr))\n"
        f"sys.argv = ['mmengine', *{list(arguments)!r}]\n"
        "from mmengine.cli.main import main\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=cwd
    )


_MANY = """
import json, sys
from tests.cli.cli_process import HEAVY, call_cli
for words in json.loads(sys.argv[1]):
    done = call_cli(*words)
    found = [name for name in (*HEAVY, "numpy", "matplotlib") if sys.modules.get(name)]
    print(json.dumps([done.returncode, done.stdout, f"{done.stderr}LOADED {found}"]))
"""


def run_clis(commands, cwd) -> list[subprocess.CompletedProcess]:
    """Run commands one after another in a single separate process in `cwd`. For each result, `loaded` returns
    the heavy modules that were imported so far.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    done = subprocess.run(
        [sys.executable, "-c", _MANY, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )
    lines = map(json.loads, done.stdout.splitlines())
    return [subprocess.CompletedProcess(words, *said) for words, said in zip(commands, lines, strict=True)]


def loaded(result):
    line = next(line for line in result.stderr.splitlines() if line.startswith("LOADED"))
    return line.removeprefix("LOADED ")
