"""The coding agents that `make clients` runs, with their configuration and commands.

In arguments and files, {address} is the server's address, {model} the model's name, {question} the question,
{work} the folder that the agent works in, and {home} its home folder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

QUESTION = "What is a triangle?"
NOTES = {"one.txt": "note-4711", "two.txt": "note-0815"}  # Files that the agents read with their tools.
PICTURE = "three.png"


@dataclass(frozen=True)
class Agent:
    """An agent, its package in a registry, and how it is run without an account.

    `command`: the program's arguments. `setup`: the arguments for an earlier run that configures the program.
    `files`: texts by path below the home folder. `tool`: the tool that reads files. `reading`: the JSON
    arguments with which this tool reads the file {path}. `edits`: the agent has no tools, and writes the
    answer to a file. `reads_pictures`: the tool returns a picture's file as an image.
    """

    package: str
    version: str
    program: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    tool: str = ""
    reading: str = ""
    edits: bool = False
    reads_pictures: bool = False

    @property
    def name(self) -> str:
        return self.package.rpartition("/")[2]

    @property
    def is_node(self) -> bool:
        return self.program.startswith("node_modules")


OPENCODE = {
    "model": "mmengine/{model}",
    "small_model": "mmengine/{model}",
    "provider": {
        "mmengine": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "mmengine",
            "options": {"baseURL": "{address}/v1", "apiKey": "none"},
            "models": {"{model}": {"name": "{model}", "limit": {"context": 32768, "output": 4096}}},
        }
    },
}
CODEX = """model = "{model}"
model_provider = "mmengine"

[model_providers.mmengine]
name = "mmengine"
base_url = "{address}/v1"
wire_api = "responses"
"""
OPENAI = {"OPENAI_API_KEY": "none"}

AGENTS = (
    Agent(
        "@anthropic-ai/claude-code",
        "2.1.332",
        "node_modules/.bin/claude",
        ("-p", "{question}"),
        {
            "ANTHROPIC_BASE_URL": "{address}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        tool="Read",
        reading='{"file_path": "{work}/{path}"}',
        reads_pictures=True,
    ),
    Agent(
        "@openai/codex",
        "0.171.0",
        "node_modules/.bin/codex",
        ("exec", "{question}"),
        files={".codex/config.toml": CODEX},
        tool="exec_command",
        reading='{"cmd": "cat {path}"}',
    ),
    Agent(
        "@qwen-code/qwen-code",
        "0.24.4",
        "node_modules/.bin/qwen",
        ("--auth-type", "openai", "{question}"),
        {**OPENAI, "OPENAI_BASE_URL": "{address}/v1", "OPENAI_MODEL": "{model}"},
        tool="read_file",
        reading='{"file_path": "{work}/{path}"}',
    ),
    Agent(
        "opencode-ai",
        "1.18.33",
        "node_modules/.bin/opencode",
        ("run", "{question}"),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files={".config/opencode/opencode.json": json.dumps(OPENCODE)},
        tool="read",
        reading='{"filePath": "{work}/{path}"}',
    ),
    Agent(
        "cline",
        "3.0.65",
        "node_modules/.bin/cline",
        ("{question}",),
        setup=("auth", "-p", "openai-compatible", "-k", "none", "-m", "{model}", "-b", "{address}/v1"),
        tool="read_files",
        reading='{"files": [{"path": "{work}/{path}"}]}',
        reads_pictures=True,
    ),
    Agent(
        "aider-chat",
        "0.86.2",
        "bin/aider",
        (
            "--model",
            "openai/{model}",
            "--yes-always",
            "--no-auto-commits",
            "--message",
            "{question}",
            "one.txt",
        ),
        {
            **OPENAI,
            "OPENAI_API_BASE": "{address}/v1",
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
        },
        edits=True,
    ),
)
