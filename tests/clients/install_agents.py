"""Installs the agents in coding_agents.py, each in a separate folder. Agents that cannot be installed are
skipped.

python -m tests.clients.install_agents build/clients/agents
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.coding_agents import AGENTS, Agent

INSTALL_S = 600  # Maximum seconds to install an agent.
READY = ".version"  # A file with the installed version.


def install_agent(agent: Agent, folder: Path) -> None:
    """Install the agent into `folder`. Raises CalledProcessError, TimeoutExpired or FileNotFoundError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if agent.is_node:
        options = ("--loglevel", "error", "--no-audit", "--no-fund", "--fetch-retries", "1")
        commands = [["npm", "install", "--prefix", str(folder), *options, f"{agent.package}@{agent.version}"]]
    else:
        python = str(folder / "bin" / "python")
        wanted = f"{agent.package}=={agent.version}"
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "--quiet", "--retries", "1", wanted],
        ]
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    (folder / READY).write_text(agent.version)


def main() -> None:
    root = Path(sys.argv[1])
    for agent in AGENTS:
        folder = root / agent.name
        ready = folder / READY
        if ready.exists() and ready.read_text() == agent.version:
            continue
        try:
            install_agent(agent, folder)
        except (subprocess.SubprocessError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            lines = (getattr(error, "stderr", None) or str(error)).splitlines()
            # npm prints the error code on line 1 and the reason on line 2. pip prints the reason last.
            reason = lines[1] if agent.is_node and len(lines) > 1 else lines[-1]
            print(f"{agent.package} {agent.version} cannot be installed and is skipped: {reason}", flush=True)


if __name__ == "__main__":
    main()
