"""Generate random answers with the masks of real schemas, and validate each answer.

    python -m benchmarks structured_generations       the project's own schemas, one-byte tokens
    python -m benchmarks structured_generations --schemas DIR --vocabulary FILE.gguf --rounds 2

    --schemas DIR      schemas in MaskBench's format (coverage_cases.py), one file per schema
    --vocabulary FILE  tekken_240911.json or a .gguf file
    --limit N          about N of the schemas
    --budget N         maximum tokens of an answer that may be cut. An answer that must be completed may have
                       as many tokens as the grammar's shortest text. Each round after the first adds half of
                       this number, and so does temperature 1.3.
    --rounds N         answers for each schema in each of the four ways below
    --ordered N        bound on the order of keys (Bounds.ordered); 0: any order
    --verbose          print every invalid answer to stderr, with its reason

The model is a table of random logits in which tokens that end a value, such as a closing bracket, are a
little more likely. There are four ways to answer: greedily or at temperature 1.3, and with a budget that may
cut the answer ("length") or must complete the answer ("close"). Backend, masks and closing are the engine's
own code. jsonschema validates each finished answer against the schema's own draft, with formats. Exits with 1
if an answer is invalid, if an answer that must be closed is cut, or if a grammar ends with an error.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from benchmarks.common.report import Table, show
from benchmarks.structured.coverage_cases import Case, of_home, of_maskbench
from benchmarks.structured.vocabulary import Bytes, load
from mmengine.errors import MMEngineError
from mmengine.request import Request, SamplingParams
from mmengine.structured_output.engines.base import Compiled
from mmengine.structured_output.engines.llguidance.backend import LLGuidance
from mmengine.structured_output.json_schema.emission.bounds import Bounds
from mmengine.structured_output.json_schema.vocabulary.keywords import to_fraction
from mmengine.structured_output.request.spec import grammar_of
from mmengine.structured_output.rows.rows import RowMatchers

TEMPERATURE = 1.3
NUM_TABLES = 32  # number of logit tables; each step uses a shifted table
LIKELIER = 2.0  # added to the logits of tokens that end a value
NOBODY = np.empty(0, np.int32)
OUTCOMES = ("valid", "invalid", "cut", "broken")
DRAFTS = {  # keyed by a substring of the schema's $schema
    "draft-03": jsonschema.Draft3Validator,
    "draft-04": jsonschema.Draft4Validator,
    "draft-06": jsonschema.Draft6Validator,
    "draft-07": jsonschema.Draft7Validator,
    "2019-09": jsonschema.Draft201909Validator,
}


@dataclass(frozen=True, slots=True)
class Answer:
    case: Case
    way: str
    outcome: str
    text: str = ""
    why: str = ""


class Model:
    """A model with random logits. `tokens` are the vocabulary's tokens."""

    def __init__(self, tokens: Sequence[bytes], eos: int, seed: int):
        source = np.random.default_rng(seed)
        size = len(tokens)
        ends = np.array([each in (b'"', b"}", b"]", b'"}', b'",', b"}}") for each in tokens])
        ends[eos] = True
        self._likelier = np.where(ends, LIKELIER, 0).astype(np.float32)
        self._tables = source.standard_normal((NUM_TABLES, size), np.float32)
        self._noise = source.gumbel(size=(NUM_TABLES, size)).astype(np.float32)
        self._source = source

    def say(self, bits: np.ndarray, temperature: float) -> int:
        """Return the next token. `bits`: the mask of allowed tokens, uint32 [words]."""
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(self._likelier)].astype(bool)
        places = np.flatnonzero(allowed)
        shift = int(self._source.integers(len(self._likelier)))
        table, noise = self._source.integers(NUM_TABLES, size=2)
        moved = (places + shift) % len(self._likelier)
        logits = self._tables[table][moved] + self._likelier[places]
        if temperature:
            logits = logits / temperature + self._noise[noise][moved]
        return int(places[logits.argmax()])


class Speaker:
    """Generates answers. `vocabulary` is an instance of a class in structured/vocabulary.py."""

    def __init__(self, vocabulary: Any, seed: int):
        self.backend = LLGuidance(
            lambda: vocabulary.tokens,
            vocabulary.encode,
            frozenset(vocabulary.special_ids),
            [vocabulary.eos],
            len(vocabulary),
            num_threads=1,
        )
        self._vocabulary, self._model = vocabulary, Model(vocabulary.tokens, vocabulary.eos, seed)

    def answer(self, compiled: Compiled, budget: int, temperature: float) -> tuple[bytes, bool, str]:
        """Return the text, whether it is complete, and the grammar's error or ""."""
        closer = compiled.closer(budget)
        rows = RowMatchers(self.backend, lambda _: compiled, len(self._vocabulary), lambda _: closer)
        rows.admit(0, Request("0", NOBODY, SamplingParams()), NOBODY)
        said: list[int] = []
        while len(said) < budget:
            bits, errors = rows.masks([0])
            if errors:
                return self._text(said), False, errors[0]
            token = self._model.say(bits[0], temperature)
            closing = rows.closing(np.array([0]), [0])
            token = closing.keep([token])[0] if closing is not None else token
            if not bits[0, token // 32] >> (token % 32) & 1:
                return self._text(said), False, f"closing gives token {token}, which the mask does not allow"
            if token == self._vocabulary.eos:
                return self._text(said), True, ""
            said.append(token)
            complete, errors = rows.advance([0], [[token]])
            if errors or complete:
                return self._text(said), bool(complete), errors.get(0, "")
        return self._text(said), False, ""

    def _text(self, said: list[int]) -> bytes:
        return b"".join(self._vocabulary.tokens[token] for token in said)


def validator_of(schema: Any) -> Any:
    """Return a validator for the schema's draft. The validator also checks formats."""
    named = schema.get("$schema", "") if isinstance(schema, dict) else ""
    kind = next(
        (each for name, each in DRAFTS.items() if name in str(named)), jsonschema.Draft202012Validator
    )
    rules = {"multipleOf": _multiple} if named else {"multipleOf": _multiple, "type": _type}
    exact = jsonschema.validators.extend(kind, rules)
    return exact(schema, format_checker=kind.FORMAT_CHECKER)


def _multiple(validator: Any, unit: Any, instance: Any, schema: Any) -> Iterator[Exception]:
    """Check multiples with exact fractions, because some multiples of 0.01 fail with floats."""
    if validator.is_type(instance, "number") and (to_fraction(instance) / to_fraction(unit)).denominator != 1:
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {unit}")


def _type(validator: Any, types: Any, instance: Any, schema: Any) -> Iterator[Exception]:
    """Check types for a schema that names no draft. OpenAPI's `nullable` allows null."""
    if instance is not None or schema.get("nullable") is not True:
        yield from jsonschema.Draft202012Validator.VALIDATORS["type"](validator, types, instance, schema)


def answers(case: Case, speaker: Speaker, budget: int, rounds: int, ordered: int) -> Iterator[Answer]:
    """Yield a schema's answers in all four ways. Raises MMEngineError for a refused schema."""
    asked = {"type": "json_schema", "json_schema": {"schema": case.schema}, "bounds": {"ordered": ordered}}
    validator = validator_of(case.schema)
    for truncation in ("length", "close"):
        compiled = speaker.backend.compile(grammar_of({**asked, "on_truncation": truncation}))
        for number in range(rounds):
            for temperature in (0.0, TEMPERATURE):
                way = f"{truncation}, {'greedy' if not temperature else TEMPERATURE}"
                most = budget
                if truncation == "close":
                    most = compiled.shortest + (number + bool(temperature)) * compiled.shortest // 2
                said, complete, broke = speaker.answer(compiled, most, temperature)
                yield _judged(case, way, validator, said, (complete, broke, truncation == "close"))


def _judged(case: Case, way: str, validator: Any, said: bytes, end: tuple[bool, str, bool]) -> Answer:
    complete, broke, must_close = end
    text = said.decode(errors="backslashreplace")
    if broke:
        return Answer(case, way, "broken", text, broke)
    if not complete:
        return Answer(case, way, "invalid" if must_close else "cut", text, "the answer was not closed")
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(said)))
    except ValueError as failure:
        return Answer(case, way, "invalid", text, str(failure))
    if error is None:
        return Answer(case, way, "valid", text)
    return Answer(case, way, "invalid", text, f"{error.json_path}: {error.message[:200]}")


def run(
    cases: Sequence[Case], speaker: Speaker, budget: int, rounds: int, ordered: int
) -> tuple[list[Answer], Counter]:
    """Return all answers, and the number of refused schemas for each reason."""
    found: list[Answer] = []
    refused: Counter = Counter()
    for case in cases:
        try:
            found += answers(case, speaker, budget, rounds, ordered)
        except MMEngineError as error:
            refused[str(error).removeprefix("schema refused: ").split(" at #")[0][:90]] += 1
    return found, refused


def table_of(found: Sequence[Answer]) -> Table:
    table = Table("Answers by random choice from masks", ("", "answers", *OUTCOMES))
    for way in dict.fromkeys(each.way for each in found):
        counts = Counter(each.outcome for each in found if each.way == way)
        table.rows.append((way, str(counts.total()), *(str(counts[outcome]) for outcome in OUTCOMES)))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--budget", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ordered", type=int, default=Bounds().ordered)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    cases = list(of_home() if options.schemas is None else of_maskbench(options.schemas))
    if options.limit:
        cases = list(islice(cases, 0, None, max(1, len(cases) // options.limit)))
    vocabulary = Bytes() if options.vocabulary is None else load(options.vocabulary)
    found, refused = run(
        cases, Speaker(vocabulary, options.seed), options.budget, options.rounds, options.ordered
    )
    table = table_of(found)
    table.notes.append(f"{len(cases)} schemas, {refused.total()} of them refused")
    reasons = Table("Refused", ("reason", "schemas"))
    reasons.rows += [(reason, str(count)) for reason, count in refused.most_common()]
    show([table, reasons], [])
    bad = [each for each in found if each.outcome in ("invalid", "broken")]
    for each in bad if options.verbose else ():
        print(
            f"{each.case.name}: {each.way}: {each.outcome}: {each.why}\n  {each.text[:2000]}", file=sys.stderr
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
