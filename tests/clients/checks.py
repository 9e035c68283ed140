"""Registers and runs the checks for Python clients. Each client_*.py is a program that prints a JSON line for
each check. The checks examine only the structure of answers, because the package's own small model knows
only images of shapes.
"""

import http.client
import json
import os
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

BASE, SMALL = (
    os.environ["BASE_URL"],
    os.environ["SMALL_URL"],
)  # Both URLs end in /v1. The small server accepts only two calls at a time.
MODEL, IMAGE = os.environ["MODEL"], os.environ["IMAGE_URL"]
EMBED_URL, RERANK_URL, IMAGE_EMBED_URL = (
    os.environ[name] for name in ("EMBED_URL", "RERANK_URL", "IMAGE_EMBED_URL")
)
EXPECTED = json.loads(Path(os.environ["EXPECTED"]).read_text())  # Written by tests/clients/pooled_models.py.
TAKES_TOOLS = os.environ["TAKES_TOOLS"] == "1"
QUESTION = "What is a triangle?"
# The package's model was trained on this prompt, so it answers in JSON without a schema.
TAUGHT = "Return JSON for this image."
REFUSED = "unsupported_parameter"  # The error code for known fields that the server refuses.
FULL_S = 0.5  # Clients call at once, and retry for more than a second.
Colour = Literal["red", "blue"]
Corners = Annotated[int, Field(ge=0, le=9)]
_checks = []


class Shape(BaseModel):
    """A shape. The values are short, because the package's model would not end long values."""

    model_config = ConfigDict(extra="forbid")

    colour: Colour
    corners: Corners
    is_large: bool
    inside: list[Colour] | None


class Anything(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="allow")


class Skipped(Exception):
    """The check was not run."""


def check(capability):
    """Register a check. `capability`: a column in the result table (run.py), optionally followed by a colon
    and the tested feature.
    """

    def kept(function):
        _checks.append((capability, function))
        return function

    return kept


def assert_close(found, wanted):
    """Assert that two (nested) lists of numbers differ by less than 1e-5."""
    if isinstance(wanted, list):
        assert len(found) == len(wanted), f"{len(found)} values instead of {len(wanted)}"
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
    else:
        assert abs(found - wanted) < 1e-5, f"{found} instead of {wanted}"


def needs_tools():
    if not TAKES_TOOLS:
        raise Skipped("the server does not accept tools")


def run():
    for capability, function in _checks:
        begun = time.monotonic()
        outcome, detail = outcome_of(function)
        seconds = round(time.monotonic() - begun, 2)
        line = {"capability": capability, "outcome": outcome, "detail": detail, "seconds": seconds}
        print(json.dumps(line), flush=True)


def outcome_of(function):
    try:
        function()
    except Skipped as error:
        return "skipped", str(error)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if REFUSED in said:
            return "refused", said[:300]
        return "failed", (said + "\n" + traceback.format_exc())[:3000]
    return "ok", ""


@contextmanager
def full_queue():
    """Keep the small server's queue full for the first FULL_S seconds of the block.

    The server accepts two calls. Six more streams compete with the client for a place that becomes free.
    """
    leaving = threading.Event()
    streams = [threading.Thread(target=_occupy, args=(leaving,)) for _ in range(8)]
    for stream in streams:
        stream.start()
    try:
        end = time.monotonic() + 10
        while not _is_full():
            assert time.monotonic() < end, "the queue does not fill"
        threading.Timer(FULL_S, leaving.set).start()
        yield
    finally:
        leaving.set()
        for stream in streams:
            stream.join()


def _is_full():
    connection = _asked({"max_tokens": 1}, timeout=0.3)
    try:
        return connection.getresponse().status == 429
    # The server queued the call, so the queue was not full. Closing the connection cancels the call.
    except TimeoutError:
        return False
    finally:
        connection.close()


def _asked(fields, timeout=30):
    connection = http.client.HTTPConnection(SMALL.split("/")[2], timeout=timeout)
    body = {"messages": [{"role": "user", "content": QUESTION}], **fields}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    return connection


def _occupy(leaving):
    """Run streams one after another until `leaving` is set."""
    while not leaving.is_set():
        connection = _asked({"max_tokens": 3000, "ignore_eos": True, "stream": True})
        response = connection.getresponse()
        while not leaving.is_set() and response.read(64):
            pass
        response.close()
        connection.close()
        leaving.wait(0.01)
