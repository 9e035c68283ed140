"""Runs Dynamo's SelectionService in the virtual environment build/store. Reads a JSON call per line from
stdin, and writes the results to stdout.
"""

import asyncio
import json
import sys

from dynamo.llm import SelectionService


async def main() -> None:
    service = SelectionService(indexer_threads=1)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        method, argument = json.loads(line)
        if "kv_events_endpoints" in argument:  # the service expects a dict keyed by integer rank
            argument["kv_events_endpoints"] = dict(enumerate(argument["kv_events_endpoints"]))
        try:
            found = getattr(service, method)(argument)
            answer = {"ok": await found if hasattr(found, "__await__") else found}
        except Exception as error:  # reported to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


asyncio.run(main())
