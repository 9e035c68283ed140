"""Runs coding agents against `mmengine serve`, without accounts, and prints a line for each check.

    make clients installs the agents under build/clients/agents, and runs this program
    python -m tests.clients.run_agents [--environment build/clients/agents] [--only codex]

First, each agent sends a question to the included checkpoint. Then each agent uses a scripted server. The
scripted answers make the agent read two files or edit a file. A check fails if a call's status is not 200, or
if the agent does not show the answer. Agents that are not installed are skipped. The exit code is 1 if a
check failed.
"""

import argparse
import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.clients.coding_agents import AGENTS, NOTES, PICTURE, QUESTION, Agent
from tests.clients.run import MODEL, ROOT, TEMPLATE, server
from tests.clients.scripted_server import EDITED, scripted_server
from tests.pictures import data_url

AGENT_S = 180  # Maximum seconds for an agent's run.
REQUESTS = re.compile(r'mmengine_http_requests_total\{code="(\d+)",method="POST",route="(/v1/[^"]+)"\} (\d+)')
# If the messages contain the question, the prompt is only the question, because the agents' prompts exceed
# the included checkpoint's context.
SHORT = (
    "{%- if '" + QUESTION + "' in (messages | string) -%}"
    "{{- '<|im_start|>user\n" + QUESTION + "<|im_end|>\n<|im_start|>assistant\n' -}}"
    "{%- else -%}" + TEMPLATE.read_text() + "{%- endif -%}"
)


def statuses(address: str) -> dict[tuple[str, str], int]:
    """Return the number of POST calls, by status and route."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        found = REQUESTS.findall(answer.read().decode())
    return {(code, route): int(count) for code, route, count in found}


class Run:
    """An agent with its home folder, its work folder, and a server's address."""

    def __init__(self, agent: Agent, installed: Path, folder: Path, address: str = ""):
        self.agent, self.address = agent, address
        self._installed, self._home = installed, folder
        self.work = folder / "work"
        shutil.rmtree(folder, ignore_errors=True)
        self.work.mkdir(parents=True)
        for path, text in NOTES.items():
            (self.work / path).write_text(f"{text}\n")
        (self.work / PICTURE).write_bytes(base64.b64decode(data_url().partition(",")[2]))
        subprocess.run(["git", "init", "--quiet", str(self.work)], check=True)

    def _filled(self, text: str) -> str:
        values = {"address": self.address, "model": MODEL, "work": str(self.work), "home": str(self._home)}
        for name, value in {**values, "question": QUESTION}.items():
            text = text.replace("{" + name + "}", value)
        return text

    def output(self) -> str:
        """Run the agent and return its standard output and errors."""
        for path, text in self.agent.files.items():
            file = self._home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._filled(text))
        program = str(self._installed / self.agent.program)
        commands = [self.agent.setup] if self.agent.setup else []
        return "\n".join(self._run([program, *each]) for each in (*commands, self.agent.command))

    def _run(self, command: list[str]) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "NO_COLOR": "1",
            **{name: self._filled(value) for name, value in self.agent.environment.items()},
        }
        process = subprocess.Popen(
            [self._filled(each) for each in command],
            cwd=self.work,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.communicate(timeout=AGENT_S)[0]
        except subprocess.TimeoutExpired:
            return f"no answer in {AGENT_S} s"
        finally:
            self._kill_remaining()

    def _kill_remaining(self) -> None:
        """Kill the daemons that the agent has left: all processes with this run's home folder."""
        mark = f"HOME={self._home}".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in environment.read_bytes().split(b"\0"):
                    os.kill(int(environment.parent.name), signal.SIGKILL)


def checked(run: Run, expected: list[str], name: str) -> bool:
    """Run the agent, print the check's line, and return whether it succeeded."""
    before = statuses(run.address)
    shown = run.output()
    calls = {key: count - before.get(key, 0) for key, count in statuses(run.address).items()}
    calls = {key: count for key, count in calls.items() if count}
    answered = calls and all(code == "200" for code, _ in calls)
    edited = not run.agent.edits or name == "answer" or EDITED in (run.work / "one.txt").read_text()
    lacking = [each for each in expected if each not in shown]
    is_good = bool(answered and edited and not lacking)
    told = ", ".join(f"{count} x {route} {code}" for (code, route), count in calls.items()) or "no call"
    outcome = "ok" if is_good else "FAILED"
    print(f"{run.agent.name} {run.agent.version}: {name}: {outcome} ({told})", flush=True)
    if not is_good:
        print(f"  not shown: {lacking}\n{shown[-4000:]}", file=sys.stderr)
    return is_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "clients" / "agents")
    parser.add_argument("--only", default="", help="run only agents whose name contains this text")
    given = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "short.jinja").write_text(SHORT)
        with server(folder, "agents", "--chat-template", str(folder / "short.jinja")) as base:
            address = base.removesuffix("/v1")
            for agent in AGENTS:
                installed = (given.environment / agent.name).absolute()
                if given.only not in agent.name:
                    continue
                if not installed.exists():
                    print(f"{agent.name} {agent.version}: not installed, skipped", flush=True)
                    continue
                asking = Run(agent, installed, folder / agent.name / "answer", address)
                failed |= not checked(asking, ["The triangle is small."], "answer")
                using = Run(agent, installed, folder / agent.name / "tools")
                with scripted_server(agent, str(using.work), MODEL) as using.address:
                    expected = [] if agent.edits else list(NOTES.values())
                    expected += ["a picture"] * agent.reads_pictures
                    failed |= not checked(using, expected, "edit" if agent.edits else "tools")
    sys.exit(failed)


if __name__ == "__main__":
    main()
