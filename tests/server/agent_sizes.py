"""Enlarges the prompts and tools in agent_turns.json to real agents' sizes. Also builds an engine with a long
context and no model.
"""

import copy
import json
from types import SimpleNamespace

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.simulation.simulated_executor import SimulatedExecutor
from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS
from mmengine.structured_output.rows.grammars import Grammars
from tests.serve.serve_fakes import FakeBuilt

# Bytes of the system prompt, number of tools, bytes of a tool's result.
SIZES = {
    "claude-code": (18_000, 24, 6000),
    "codex": (24_000, 15, 5000),
    "cline": (8000, 27, 4000),
    "opencode": (10_000, 18, 6000),
    "qwen-code": (40_000, 20, 4000),
    "continue": (8000, 15, 3000),
    "aider": (12_000, 0, 5000),
    "open-webui": (8000, 0, 3000),
}
NOUNS = ("file", "test", "branch", "command", "result", "symbol", "module", "error", "path", "patch")
VERBS = ("read", "change", "compare", "move", "list", "check", "write", "find", "explain", "keep")
SCHEMA_CHARS = 1200  # The size of a tool's schema.
MAX_MODEL_LEN = 160_000


def text_of(num_chars: int, number: int = 0) -> str:
    """Return a text with about `num_chars` characters, in which no two lines are equal."""
    lines, size = [], 0
    while size < num_chars:
        k = number * 7919 + len(lines)
        first, second, verb = NOUNS[k % 10], NOUNS[k // 10 % 10], VERBS[k // 3 % 10]
        lines.append(f"{k}. Before you {verb} the {first} `{second}_{k}.py`, name each {second} after it.")
        size += len(lines[-1]) + 1
    return "\n".join(lines)


def schema_of(number: int) -> dict:
    """Return a tool's JSON schema with nested objects, choices, bounds and descriptions."""
    properties: dict[str, dict] = {}
    while len(json.dumps(properties)) < SCHEMA_CHARS:
        k = len(properties)
        name = f"{NOUNS[(number + k) % 10]}_{k}"
        described = {"description": text_of(60, number + k)}
        properties[name] = [
            {"type": "string", **described},
            {"type": "integer", "minimum": 0, "maximum": 9007199254740991, **described},
            {"type": "string", "enum": list(VERBS[: 3 + number % 5]), **described},
            {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], **described},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}, "line": {"type": ["integer", "null"]}},
                    "required": ["path"],
                    "additionalProperties": False,
                },
                **described,
            },
        ][k % 5]
    required = list(properties)[:2]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def enlarge(name: str, client: dict) -> dict:
    """Return the client with a prompt, tools and tool results that are as large as a real agent's."""
    system, num_tools, result = SIZES[name]
    texts = {"{system}": text_of(system), "{result}": text_of(result, 1)}
    written = json.dumps(client)
    for mark, text in texts.items():
        written = written.replace(mark, json.dumps(text)[1:-1])
    client = json.loads(written)
    tools = client["body"].get("tools", [])
    made = [copy.deepcopy(tools[0]) for _ in range(num_tools - len(tools))] if tools else []
    for number, tool in enumerate(made):
        function = tool.get("function", tool)
        function |= {"name": f"tool_{number}", "description": text_of(400, number)}
        key = "input_schema" if "input_schema" in function else "parameters"
        function[key] = schema_of(number)
    if tools:
        client["body"]["tools"] = [*tools, *made]
    return client


def build_long(model=None, *, stop_watcher_factory=None, **settings) -> FakeBuilt:
    """Build an engine with the included checkpoint's processor and grammars, a long context, and random
    tokens instead of a model.
    """
    folder = resolve_folder(None)
    processor = plugin_for(folder).load_processor(folder)
    processor.max_positions = processor.max_prompt_tokens = MAX_MODEL_LEN
    config = EngineConfig(
        num_blocks=MAX_MODEL_LEN // 16 + 1,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        eos_token_ids=processor.eos_token_ids,
        encoder_cache_size=64,
    )
    tokenizer, size = processor.tokenizer, processor.tokenizer.vocab_size
    executor = LongExecutor(config, vocab_size=1000)
    kind = GRAMMAR_BACKENDS.load("llguidance")
    backend = kind(tokenizer.token_bytes, tokenizer.encode, tokenizer.special_ids, config.eos_token_ids, size)
    built = FakeBuilt(EngineCore(config, executor), executor, config, processor)
    built.spec = SimpleNamespace(vocab_size=size, has_encoder=False, hidden_size=0)
    built.grammars = Grammars(backend, deadline_s=30)
    return built


class LongExecutor(SimulatedExecutor):
    """A simulated executor with the attributes that an engine needs. Supports only requests without media."""

    drafters = ()
    graph_counts = {}  # noqa: RUF012 - never changed

    def attach(self, request_id, media):
        assert not media

    def release(self, request_id):
        pass
