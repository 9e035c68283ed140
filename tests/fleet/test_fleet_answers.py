"""Tests that lost replicas do not change a real model's answers."""

import asyncio
import contextlib
import random

import pytest

from mmengine.config import EngineConfig
from mmengine.fleet.attempt import ReplicaLost, RoutingLimits
from mmengine.fleet.engine import FleetEngine
from mmengine.fleet.replica import Replica
from mmengine.fleet.wire import Accepted, Outputs, decode_message
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.prompt.tools import ToolCallSpec, parse_tools

PROPERTIES = {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 20}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}, "on_truncation": "close"}
SURE = {**FORM, "field_confidence": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
ASKED = {
    "greedy": {"max_tokens": 12},
    "three warm ones": {"max_tokens": 12, "temperature": 1.3, "seed": 7, "n": 3, "top_p": 0.9},
    "penalties and drafts": {"max_tokens": 16, "temperature": 1.0, "seed": 3, "frequency_penalty": 1, "n": 2},
    "logprobs": {"max_tokens": 8, "temperature": 1.0, "seed": 4, "logprobs": 2, "prompt_logprobs": 1, "n": 2},
    "a form": {"max_tokens": 24, "temperature": 1.2, "seed": 5, "n": 2, "response_format": FORM},
    "confidences": {"max_tokens": 24, "temperature": 1.2, "seed": 5, "logprobs": 1, "response_format": SURE},
    "calls": {"max_tokens": 40, "seed": 6, "calls": ToolCallSpec(parse_tools([TOOL], "required"), "json")},
    "a stop string": {"max_tokens": 40, "temperature": 1.2, "seed": 8, "stop": ["e"]},
    "a budget": {"max_tokens": 16, "temperature": 1.0, "seed": 9, "thinking_token_budget": 3},
}
FEW = ("three warm ones", "a form", "logprobs", "confidences")  # for tests that run often


class Breaking:
    """Calls two replicas in turn. At each Accepted or Outputs message, the replica is lost with probability
    0.15.
    """

    def __init__(self, *replicas):
        self.replicas, self.chosen, self.num_breaks = list(replicas), random.Random(1), 0

    def is_leaving(self, replica):
        return False

    async def call(self, key, data):
        self.replicas.reverse()
        async with contextlib.aclosing(self.replicas[0].run(data)) as words:
            async for word in words:
                if isinstance(decode_message(word), (Accepted, Outputs)) and self.chosen.random() < 0.15:
                    self.num_breaks += 1
                    raise ReplicaLost("a break")
                yield word


def prompt_for(name):
    if name == "a budget":
        return Prompt(text="<|im_start|>assistant\n<think>\n")
    return Prompt([{"role": "user", "content": "Tell me about shapes."}])


def kept(completion):
    """Return the answer without counts of tokens and drafts, which lost replicas change."""
    return completion.choices, completion.prompt_logprobs, completion.prompt_token_ids.tolist()


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(ASKED), marks=pytest.mark.soak)], ids=["few", "all"]
)
def test_tokens_are_equal_whatever_is_interrupted(names):
    async def go():
        config = EngineConfig(spec="ngram", max_num_seqs=8, batch_invariant=True)
        engines = [AsyncEngine(config=config) for _ in "ab"]
        carrier = Breaking(*(Replica(name, each) for name, each in zip("ab", engines)))
        patience = RoutingLimits(deaths=100)
        fleet = FleetEngine(carrier, engines[0].processor, engines[0].config, 64, patience)

        async def both(name):
            options, prompt = ASKED[name], prompt_for(name)
            wanted = await engines[0].generate(prompt, **options)
            assert kept(await fleet.generate(prompt, **options)) == kept(wanted), name

        await asyncio.gather(*map(both, names))
        assert carrier.num_breaks > 5
        for each in (fleet, *engines):
            await each.close()

    asyncio.run(go())
