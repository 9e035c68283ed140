"""Makes fifty concurrent calls with OpenAI's Python client to a server that dies and restarts.

    python -m tests.durable.clients PORT ENGINE

Each line on stdin names a round. For each round, the program prints two lines. The first line, with the
number of POST requests, appears when fifty requests are sent or all calls have ended. The second line has
each call's result. A result's field `error` describes an exception or a wrong answer.
"""

import asyncio
import json
import re
import sys
import time

import openai

from tests.durable.open_calls import BATCHES, CHAT, RESPONSES, calls
from tests.pictures import scene

PATIENCE_S = 90.0
POLL_S = 0.15
# Fields for which the client has no parameter: `ignore_eos` in every API, `seed` only in the Responses API.
EXTRA = ("ignore_eos", "seed")
BY_CHANCE = ("created", "created_at", "completed_at", "cached_tokens", "accepted_prediction_tokens")
BY_CHANCE += ("rejected_prediction_tokens",)
SHUTDOWN = "the server is shutting down"  # the error's text in a stream that a shutdown ends
OVER = ("completed", "incomplete", "failed", "cancelled")


class Told(Exception):
    """A call received a wrong answer."""


class Round:
    def __init__(self, client, name, echo):
        self._client, self._name, self._echo = client, name, echo
        self.num_sent, self.num_retries = 0, 0

    async def run(self):
        """Run the calls and return each call's result by its name."""
        every = calls(self._echo)
        told = await asyncio.gather(*(self._told(call) for call in every))
        return {call.name: one for call, one in zip(every, told, strict=True)}

    def sent(self, request):
        """Count a request that the client sends."""
        if request.method == "POST":
            self.num_sent += 1
        self.num_retries += request.headers.get("x-stainless-retry-count", "0") != "0"

    async def _told(self, call):
        found = {"breaks": [], "ids": []}
        try:
            async with asyncio.timeout(PATIENCE_S):
                found["text"] = await self._call(call, found)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:1200]
        return {**found, "ended": time.monotonic()}

    async def _call(self, call, found):
        if call.api == BATCHES:
            return await self._batch(call, found)
        body = dict(call.body)
        if call.uploads:
            file = await self._client.files.create(file=("scene.png", scene()), purpose="vision")
            body = json.loads(json.dumps(body).replace("UPLOADED", file.id))
        if call.api == RESPONSES:
            return await self._response(call, body, found)
        body = _named(body) | {"user": f"{self._name}-{call.name}"}
        api = self._client.chat.completions if call.api == CHAT else self._client.completions
        if call.stream:
            return await self._stream(api, call, body, found)
        answer = await api.create(**body, extra_headers=self._headers(call))
        found["ids"].append(answer.id)
        return _same(answer.to_dict(), answer.id)

    def _headers(self, call):
        return {call.key: f"{self._name}-{call.name}"} if call.key else {}

    async def _stream(self, api, call, body, found):
        """Read a chat or completions stream; if it breaks, make the same call again."""
        before = []
        while True:
            events, is_broken = [], False
            try:
                async for event in await api.create(**body, stream=True, extra_headers=self._headers(call)):
                    events.append(event.to_dict())
            except openai.APIError as error:
                if not isinstance(error, openai.APIConnectionError) and SHUTDOWN not in str(error):
                    raise
                is_broken = True
                found["breaks"].append(f"{type(error).__name__} {len(events)}")
            if events:
                found["ids"].append(events[0]["id"])
            is_same = bool(events and before) and events[0]["id"] == before[0]["id"]
            now, then = _by_choice(events, is_same), _by_choice(before, is_same)
            for index in now.keys() & then.keys():
                count = min(len(now[index]), len(then[index]))
                if now[index][:count] != then[index][:count]:
                    raise Told(f"other events, {_first_other(then[index][:count], now[index][:count])}")
            if call.key and events and before and not is_same:
                raise Told("another id than before, though it has a key")
            if not is_broken:
                ends = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
                if len(ends) != call.body.get("n", 1) * (2 if "two-prompts" in call.name else 1):
                    raise Told(f"a clean end behind {len(events)} events, {len(ends)} of them ends")
                return json.dumps(sorted(_by_choice(events, False).items()))
            before = max(before, events, key=len)

    async def _response(self, call, body, found):
        api, headers = self._client.responses, self._headers(call)
        if call.stream:
            return await self._events(call, body, found)
        body = _named(body)
        answer = await api.create(**body, background=call.background or None, extra_headers=headers)
        found["ids"].append(answer.id)
        while answer.status not in OVER:
            await asyncio.sleep(POLL_S)
            answer = await api.retrieve(answer.id)
        return _same(answer.to_dict(), answer.id)

    async def _events(self, call, body, found):
        """Read a response's stream line by line; if it breaks, continue after the last event."""
        api, lines, told = self._client.responses, [], {}
        body, options = _named(body), {"background": call.background} if call.background else {}
        while told.get("type") not in ("response.completed", "response.incomplete"):
            if not told:
                asked = api.with_streaming_response.create(
                    **body, **options, stream=True, extra_headers=self._headers(call)
                )
            else:
                asked = api.with_streaming_response.retrieve(
                    found["ids"][-1], stream=True, starting_after=told["sequence_number"]
                )
            came, is_broken = await _heard(asked, found)
            lines += came
            data = [line for line in came if line.startswith("data: {")]
            if data:
                told = json.loads(data[-1].removeprefix("data: "))
                if not found["ids"]:
                    found["ids"].append(json.loads(data[0].removeprefix("data: "))["response"]["id"])
            if not is_broken and told.get("type") not in ("response.completed", "response.incomplete"):
                raise Told(f"a clean end behind {told}")
        is_broken = True
        while is_broken:  # this stream may break, too
            again = api.with_streaming_response.retrieve(found["ids"][-1], stream=True)
            whole, is_broken = await _heard(again, found)
        if whole != lines:
            raise Told(f"other lines than all of it, {_first_other(lines, whole)}")
        return _same(lines, found["ids"][-1])

    async def _batch(self, call, found):
        lines = [
            json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": body})
            for n, body in enumerate(call.body["lines"])
        ]
        data = "\n".join(lines).encode()
        file = await self._client.files.create(file=("requests.jsonl", data), purpose="batch")
        batch = await self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        found["ids"].append(batch.id)
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(POLL_S)
            batch = await self._client.batches.retrieve(batch.id)
        if batch.status != "completed" or batch.request_counts.completed != len(lines):
            raise Told(f"the batch ended so: {batch}")
        came = (await self._client.files.content(batch.output_file_id)).content.decode().splitlines()
        answers = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, came)}
        if sorted(answers, key=int) != [f"{n}" for n in range(len(lines))] or len(came) != len(lines):
            raise Told(f"not each line once: {came}")
        return "\n".join(_same(answers[name], answers[name]["id"]) for name in sorted(answers))


def _named(body):
    """Return the call's keyword arguments: named parameters, and other fields in `extra_body`."""
    extra = {name: body[name] for name in EXTRA if name in body and (name != "seed" or "input" in body)}
    rest = {name: value for name, value in body.items() if name not in extra}
    return {"model": "mmengine-shapes", **rest, **({"extra_body": extra} if extra else {})}


async def _heard(asked, found):
    """Return the lines of a response's complete events, and whether the stream broke."""
    came, is_broken = [], False
    try:
        async with asked as response:
            async for line in response.iter_lines():
                came.append(line)
    except Exception as error:
        if not isinstance(error, openai.APIConnectionError) and "httpx" not in type(error).__module__:
            raise
        is_broken = True
        found["breaks"].append(f"{type(error).__name__} {len(came)}")
    came = came[: len(came) - came[::-1].index("")] if "" in came else []
    if "event: error" in came:
        if SHUTDOWN not in came[came.index("event: error") + 1]:
            raise Told(f"an error: {came[-3:]}")
        came, is_broken = came[: came.index("event: error")], True
        found["breaks"].append("shutdown")
    return came, is_broken


def _first_other(one, two):
    if one[: len(two)] == two or two[: len(one)] == one:
        return f"{[each[:100] for each in one[-7:]]} and {[each[:100] for each in two[-7:]]}"
    place = next((n for n, both in enumerate(zip(one, two, strict=False)) if both[0] != both[1]), -1)
    return f"{len(one)} and {len(two)}; at {place} {one[place]!r:.500} and {two[place]!r:.500}"


def _by_choice(events, is_same):
    """Group events by choice, since the order between choices varies.

    With `is_same`, events keep their ids and times.
    """
    found = {}
    for event in events:
        index = event["choices"][0]["index"] if event["choices"] else -1
        found.setdefault(index, []).append(json.dumps(event) if is_same else _same(event, event["id"]))
    return found


def _same(answer, name):
    """Return the answer as JSON without values that vary.

    Ids, times, logprobs (the last bits depend on the batch), and the counts of cached prompt tokens and
    drafted tokens vary.
    """
    text = json.dumps(answer, sort_keys=True)
    text = text.replace(name.partition("_")[2] or name, "ID").replace(name.removeprefix("chatcmpl-"), "ID")
    text = re.sub(rf'(\\?"(?:{"|".join(BY_CHANCE)})\\?": ?)[0-9.]+', r"\1 0", text)
    text = re.sub(r"call_[0-9a-f]{24}", "CALL", text)  # depends on the request's id
    return re.sub(r"-?\d+\.\d+(e-?\d+)?|-?\d+e-\d+", "FLOAT", text)


async def main():
    port, engine = sys.argv[1:]
    now = []
    hooks = {"request": [lambda request: _noted(now, request)]}
    transport = openai.DefaultAsyncHttpxClient(event_hooks=hooks)
    options = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "none", "http_client": transport}
    client = openai.AsyncOpenAI(**options)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().strip():
        now[:] = [Round(client, line, engine == "echo")]
        running = asyncio.create_task(now[0].run())
        while now[0].num_sent < 50 and not running.done():
            await asyncio.sleep(0.005)
        print(json.dumps({"sent": now[0].num_sent}), flush=True)
        told = await running
        print(json.dumps({"retries": now[0].num_retries, "calls": told}), flush=True)


async def _noted(now, request):
    now[0].sent(request)


if __name__ == "__main__":
    asyncio.run(main())
