"""Runs third-party clients against `mmengine serve` with the included checkpoint, and writes a result table.

    make clients                              # creates their environment and runs this program
    python -m tests.clients.run --environment build/clients [--only langchain] [--table docs/clients.md]

The exit code is 1 if a check failed. A check is "refused" if the server does not support the fields in the
check's call, and "skipped" if the check did not run.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mmengine.server.app.openapi import NOT_DONE
from tests.clients import pooled_models
from tests.pictures import data_url

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON_CLIENTS = {
    "openai": "client_openai.py",
    "langchain-openai": "client_langchain.py",
    "instructor": "client_instructor.py",
    "pydantic-ai-slim": "client_pydantic_ai.py",
    "openai-agents": "client_agents.py",
    "llama-index-embeddings-openai-like": "client_llama_index.py",
    "cohere": "client_cohere.py",
    "schemathesis": "client_schemathesis.py",
}
SENTENCE_TRANSFORMERS = "client_sentence_transformers.py"
NODE_CLIENTS = {"openai": "client_openai.mjs", "ai": "client_ai_sdk.mjs"}
COLUMNS = ("chat", "streams", "images", "structured output", "tools in a loop", "embeddings", "reranking")
COLUMNS += ("errors", "retries")
MODEL = "shapes"
# The server accepts two concurrent calls; a third gets status 429.
SMALL = ("--set", "max_num_seqs=1", "--set", "max_waiting=1")
TEMPLATE = ROOT / "examples" / "tool_calls.jinja"  # The included model has no chat template with tools.
CLIENT_S = 600  # Maximum seconds for a client.


@contextmanager
def server(folder: Path, name: str, *arguments: str) -> Iterator[str]:
    """Run a server and yield its address."""
    command = (
        sys.executable,
        "-m",
        "mmengine.cli.main",
        "serve",
        "--port",
        "0",
        "--served-model-name",
        MODEL,
    )
    err = folder / f"{name}.err"
    with err.open("w") as written:
        process = subprocess.Popen([*command, *arguments], stderr=written, cwd=ROOT)
    try:
        while " at http://" not in (said := err.read_text()):
            if process.poll() is not None:
                raise SystemExit(said)
            time.sleep(0.05)
        yield said.rpartition(" at ")[2].split(",")[0].strip()
        assert process.poll() is None, err.read_text()
        assert "Traceback" not in err.read_text(), err.read_text()
    finally:
        process.terminate()
        process.wait(60)


def takes_tools(address: str) -> bool:
    """Return whether the server's OpenAPI document supports tools."""
    with urllib.request.urlopen(address.removesuffix("/v1") + "/openapi.json") as answer:
        found = json.load(answer)
    tools = found["components"]["schemas"]["ChatBody"]["properties"].get("tools", {})
    return bool(tools) and not tools["description"].startswith(NOT_DONE)


def checks_of(command: list[str], environment: dict[str, str], folder: Path) -> list[dict]:
    """Run a client program and return the results of its checks. A crash adds a failed check."""
    ran = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=CLIENT_S
    )
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode:
        found.append({"capability": "chat", "outcome": "failed", "detail": ran.stderr[-2000:], "seconds": 0})
    return found


def versions_in(environment: Path) -> dict[str, str]:
    """Return a dict from each installed distribution's name to its version."""
    sites = [str(each) for each in (environment / "lib").glob("python3*/site-packages")]
    return {each.name: each.version for each in importlib.metadata.distributions(path=sites)}


def clients_in(environment: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Yield each client's name with version, command, and working folder."""
    python = (environment / "python" / "bin" / "python").absolute()
    versions = versions_in(environment / "python")
    for name, script in PYTHON_CLIENTS.items():
        yield f"{name} {versions[name]}", [str(python), str(HERE / script)], environment
    sentence = environment / "sentence"
    if (version := versions_in(sentence).get("sentence-transformers")) is not None:
        python = (sentence / "bin" / "python").absolute()
        yield (
            f"sentence-transformers {version}",
            [str(python), str(HERE / SENTENCE_TRANSFORMERS)],
            environment,
        )
    node = environment / "node"
    for name, script in NODE_CLIENTS.items():
        package = node / "node_modules" / name / "package.json"
        if package.exists():
            version = json.loads(package.read_text())["version"]
            yield f"{name} {version} (Node)", ["node", script], node


def cell(checks: list[dict]) -> str:
    """Return a table cell with a client's results in one column."""
    if not checks:
        return ""
    outcomes = [each["outcome"] for each in checks]
    if len(set(outcomes)) == 1:
        return outcomes[0] if len(outcomes) == 1 else f"{outcomes[0]} ({len(outcomes)})"
    return ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))


def table(found: dict[str, list[dict]]) -> str:
    lines = [f"| client | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
    for client, checks in found.items():
        by_column = [
            [each for each in checks if each["capability"].split(":")[0] == name] for name in COLUMNS
        ]
        lines.append(f"| {client} | {' | '.join(cell(each) for each in by_column)} |")
    return "\n".join(lines) + "\n"


def remarks(found: dict[str, list[dict]]) -> str:
    """Return a Markdown list with each client's tested features and the reasons for bad results."""
    lines = []
    for client, checks in found.items():
        ways = [each["capability"] for each in checks if ":" in each["capability"]]
        if ways:
            lines.append(f"* {client}: {'; '.join(ways)}.")
        for each in checks:
            if each["outcome"] != "ok":
                lines.append(
                    f"    * {each['capability']}: {each['outcome']}: {each['detail'].splitlines()[0][:300]}"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--only", default="", help="run only clients whose name contains this text")
    parser.add_argument("--table", type=Path, help="file for the table")
    given = parser.parse_args()
    template = ("--chat-template", str(TEMPLATE)) if TEMPLATE.exists() else ()
    found: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as running:
        folder = Path(temporary)
        base = running.enter_context(server(folder, "base", *template))
        small = running.enter_context(server(folder, "small", *template, *SMALL))
        models = pooled_models.write_models(folder)
        embed, rerank, image_embed = (
            running.enter_context(server(folder, name, *pooled_models.ARGUMENTS, "--model", str(model)))
            for name, model in models.items()
        )
        environment = {
            **os.environ,
            "EMBED_URL": embed,
            "RERANK_URL": rerank,
            "IMAGE_EMBED_URL": image_embed,
            "EXPECTED": str(folder / "expected.json"),
            "BASE_URL": base,
            "SMALL_URL": small,
            "MODEL": MODEL,
            "IMAGE_URL": data_url(),
            "TAKES_TOOLS": str(int(takes_tools(base))),
        }
        for client, command, where in clients_in(given.environment):
            if given.only in client:
                found[client] = checks_of(command, environment, where)
                for each in found[client]:
                    said = each["detail"].splitlines()[0][:200] if each["detail"] else ""
                    print(f"{client}: {each['capability']}: {each['outcome']} {said}", flush=True)
    ran_on = f"Python {platform.python_version()}, {platform.system()}; `make clients`.\n\n"
    page = ran_on + table(found) + "\n" + remarks(found)
    print("\n" + page)
    if given.table:
        given.table.write_text("# Clients\n\n" + page)
    failed = [each for checks in found.values() for each in checks if each["outcome"] == "failed"]
    for each in failed:
        print(each["capability"], each["detail"], sep="\n", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
