"""Runs test cases with a grammar engine in a worker process, so that a crash or timeout affects only one
case.
"""

import json
import multiprocessing
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.structured.coverage_cases import Case, in_order, places_of, spellings
from benchmarks.structured.coverage_sides import SIDES, Refused, Side
from benchmarks.structured.vocabulary import Vocabulary

VERDICTS = ("exact", "refused", "over", "under", "crashed")
BEGIN_S = 120  # maximum time to start a worker, which converts the vocabulary
TOO_LONG = "took more than"
MAX_WALKED = 2_000  # maximum number of mask times stored per answer


@dataclass(slots=True)
class Found:
    """A case's verdict. "over": a valid text was refused, even with its keys in the schema's order.
    "under": an invalid text was accepted. `why` is the reason for a verdict other than "exact". `reordered`
    is the number of valid texts that were refused in their original key order. `compile_s` is the time to
    compile the schema, and `masks_s` has the time for each mask. Both times are measured with a tokenizer's
    vocabulary, for the first valid instance.
    """

    verdict: str
    why: str = ""
    keyword: str = ""
    reordered: int = 0
    compile_s: float | None = None
    masks_s: list[float] = field(default_factory=list)


def judged(side: Side, case: Case) -> Found:
    accepts = side.judge(case.schema)
    places = places_of(case.schema)
    reordered = 0
    over = ""
    for data, valid in case.tests:
        if not valid:
            for text in spellings(data):
                if accepts(text):
                    return Found("under", text[:300])
            continue
        for number, text in enumerate(list(spellings(data))[:2]):
            if accepts(text):
                continue
            reordered += 1
            if not accepts(list(spellings(in_order(data, places)))[number]):
                over = over or text[:300]
    return Found("over" if over else "exact", over, reordered=reordered)


def ask(side: Side, case: Case, clocked: bool) -> Found:
    try:
        found = judged(side, case)
    except Refused as refused:
        return Found("refused", str(refused)[:300], refused.keyword)
    answer = next((data for data, valid in case.tests if valid), None)
    if clocked and answer is not None:
        try:
            walk = side.walk(case.schema, json.dumps(in_order(answer, places_of(case.schema))))
        except Refused as refused:
            found.why = found.why or f"with a vocabulary: {refused}"[:300]
            return found
        found.compile_s = walk.compile_s
        found.masks_s = walk.masks_s[:MAX_WALKED] if walk.whole else []
    return found


def _serve(connection: Connection, name: str, vocabulary: Vocabulary | None) -> None:
    side = SIDES[name](vocabulary)
    connection.send_bytes(b"ready")
    while True:
        case = Case(**json.loads(connection.recv_bytes()))
        try:
            found = ask(side, case, vocabulary is not None and "/" not in name)
        except BaseException as error:  # a library may raise errors of any kind
            found = Found("crashed", f"{type(error).__name__}: {error}"[:300])
        connection.send_bytes(json.dumps(asdict(found)).encode())


class Worker:
    """A worker process, started at its first case. `limit_s` is the maximum time for a case."""

    def __init__(self, name: str, vocabulary: Vocabulary | None, limit_s: float):
        self._name, self._vocabulary, self._limit_s = name, vocabulary, limit_s
        self._process: Any = None

    def ask(self, case: Case) -> Found:
        if self._process is None:
            self._begin()
        self._connection.send_bytes(json.dumps(asdict(case)).encode())
        if not self._connection.poll(self._limit_s):
            self.close()
            return Found("crashed", f"{TOO_LONG} {self._limit_s:g} s")
        try:
            return Found(**json.loads(self._connection.recv_bytes()))
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.close()
            return Found("crashed", f"the process ended with {code}")

    def _begin(self) -> None:
        context = multiprocessing.get_context("fork")  # fork shares the loaded vocabulary
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._name, self._vocabulary), daemon=True
        )
        self._process.start()
        theirs.close()
        if not self._connection.poll(BEGIN_S) or self._connection.recv_bytes() != b"ready":
            raise SystemExit(f"{self._name} did not start")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None
