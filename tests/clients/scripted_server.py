"""A server with scripted answers, for tests of coding agents. The first answer calls the agent's tool, and
the next answer repeats the tool's results.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmengine import AsyncEngine
from mmengine.models.plugin import Prepared
from tests.clients.coding_agents import NOTES, PICTURE, Agent
from tests.serve.serve_fakes import EchoExecutor, EchoProcessor, builder
from tests.server.running import served

EDITED = "note-edited"


class Script(EchoProcessor):
    """A processor that returns the next scripted answer as the prompt. SaysPrompt repeats the prompt."""

    def __init__(self, agent: Agent, work: str):
        self._agent, self._work = agent, work

    def prepare(self, messages: Any, **options: Any) -> Prepared:
        results = [str(each["content"]) for each in messages if each["role"] == "tool"]
        tools = (options.get("template_options") or {}).get("tools") or []
        if results:
            found = list(dict.fromkeys(re.findall(r"note-\d+", " ".join(results))))
            found += ["a picture"] * ("'image_url'" in str(messages))
            return self.prepare_text("The files have " + " and ".join(found) + ".")
        if any(each["function"]["name"] == self._agent.tool for each in tools):
            paths = [*NOTES, PICTURE] if self._agent.reads_pictures else NOTES
            return self.prepare_text("\n".join(map(self._call_of, paths)))
        if self._agent.edits:
            return self.prepare_text(f"one.txt\n```\n{EDITED}\n```\n")
        return self.prepare_text("Notes")

    def _call_of(self, path: str) -> str:
        written = self._agent.reading.replace("{work}", self._work).replace("{path}", path)
        call = {"name": self._agent.tool, "arguments": json.loads(written)}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


class SaysPrompt(EchoExecutor):
    """An executor that answers with the prompt."""

    def answer_to(self, prompt: bytes) -> bytes:
        return prompt


@contextmanager
def scripted_server(agent: Agent, work: str, model: str) -> Iterator[str]:
    """Run a server on a thread and yield its address."""
    sizes = {"num_blocks": 2000, "max_model_len": 8000}
    build = builder(executor_class=SaysPrompt, processor=Script(agent, work), **sizes)
    with served(AsyncEngine(builder=build), names=(model,)) as one:
        yield f"http://127.0.0.1:{one.port}"
