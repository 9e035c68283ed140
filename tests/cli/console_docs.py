"""Runs the commands in a document's console blocks, and compares their output with the document.

    python -m tests.cli.console_docs docs/reference/log.md    writes the commands' output into the document

In a block marked `console`, a command's output follows the line "$ command". A line "…" stands for any number
of lines. `mmengine` and `python` use this checkout, and the shell finds all other commands. The commands from
all blocks run in the same folder.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cli.cli_process import call_cli

ROOT = Path(__file__).parents[2]
COLUMNS = "110"
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return each command with the output lines that the document shows after the command."""
    found: list[tuple[str, list[str]]] = []
    for block in _BLOCK.findall(text):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def run(command: str, folder: Path) -> list[str]:
    """Return the lines that a command prints. `mmengine` runs in this process unless the command needs a
    shell.
    """
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    if (words := shlex.split(command))[0] == "mmengine" and not set(command) & set("|<>;&$*~"):
        called = call_cli(*words[1:], env={**os.environ, "COLUMNS": COLUMNS}, cwd=folder)
        return [line.rstrip() for line in (called.stdout + called.stderr).splitlines()]
    (folder / "bin").mkdir(exist_ok=True)
    for name, arguments in {"mmengine": "-m mmengine.cli.main ", "python": ""}.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": COLUMNS}
    environment["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]


def agrees(shown: list[str], printed: list[str]) -> bool:
    pattern = "\n".join("…" if line.strip() == "…" else line for line in shown)
    expression = re.escape(pattern).replace(re.escape("…"), ".*")
    return re.fullmatch(expression, "\n".join(printed), re.S) is not None


def rewrite(path: Path) -> None:
    """Update each output in the document that differs from the command's output."""
    text = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for command, shown in commands(text):
            printed = run(command, Path(folder))
            if not agrees(shown, printed):
                old = "\n".join([f"$ {command}", *shown])
                text = text.replace(old + "\n", "\n".join([f"$ {command}", *printed]) + "\n", 1)
                print(f"rewritten: {command}")
    path.write_text(text)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
