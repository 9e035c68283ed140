"""Running the command: in this process, or in one of its own where that is what a test is about."""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from mmengine.cli.main import main

HEAVY = ("torch", "transformers", "PIL", "av", "tokenizers", "llguidance", "xgrammar")


def call_cli(*arguments, env=None, cwd=None) -> subprocess.CompletedProcess:
    """Run the command in this process: its exit code, and what a process would have written, which is what
    native code writes too. `env`: all of its environment. Arguments, environment, folder, threads and the
    settings of logging are then as they were."""
    before = sys.argv, dict(os.environ), os.getcwd(), torch.get_num_threads()
    sys.argv = ["mmengine", *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            _set_environment(before[1] if env is None else env)
            os.chdir(cwd or before[2])
            with _streams(out, err):
                code = _exit_code()
        finally:
            sys.argv = before[0]
            _set_environment(before[1])
            os.chdir(before[2])
            torch.set_num_threads(before[3])
            structlog.reset_defaults()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(["mmengine", *arguments], code, *texts)


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
    """Descriptors 1 and 2, and Python's streams over them, go to these files."""
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
    """Run the command in a process of its own and say which heavy modules it loaded."""
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


def loaded(result):
    line = next(line for line in result.stderr.splitlines() if line.startswith("LOADED"))
    return line.removeprefix("LOADED ")
