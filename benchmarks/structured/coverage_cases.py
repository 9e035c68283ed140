"""The schemas of benchmarks/structured_coverage.py, with valid and invalid instances."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOME = Path(__file__).with_name("coverage_schemas.jsonl")


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and its tests. A test is a pair: an instance, and whether the schema allows this instance."""

    group: str
    name: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]


def of_suite(folder: Path) -> Iterator[Case]:
    """Yield the cases of every draft in a JSON-Schema-Test-Suite checkout. The group is the draft, then the
    tested keyword. For optional behaviour, "optional" replaces the keyword.
    """
    for draft in sorted(path for path in (folder / "tests").iterdir() if path.is_dir()):
        for path in sorted(draft.rglob("*.json")):
            inside = path.relative_to(draft)
            kind = inside.parent.as_posix().replace("optional/format", "optional format")
            # format.json expects formats to be ignored. The engines enforce formats, so this file counts as
            # optional.
            if inside.as_posix() == "format.json":
                kind = "optional"
            group = f"{draft.name} {path.stem if kind == '.' else kind}"
            for number, found in enumerate(json.loads(path.read_text())):
                tests = tuple((test["data"], test["valid"]) for test in found["tests"])
                name = f"{inside.as_posix()}#{number} {found['description']}"
                yield Case(group, name, _with_draft(found["schema"], draft.name), tests)


def _with_draft(schema: Any, draft: str) -> Any:
    """Return the schema. Add a missing $schema if the draft is older than 2019-09."""
    old = {"draft3": "03", "draft4": "04", "draft6": "06", "draft7": "07"}
    if draft not in old or not isinstance(schema, dict) or "$schema" in schema:
        return schema
    return {"$schema": f"http://json-schema.org/draft-{old[draft]}/schema#", **schema}


def of_maskbench(folder: Path) -> Iterator[Case]:
    """Yield the cases of a MaskBench folder, which has a file per schema. The group is taken from the file's
    name.
    """
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        group = path.stem.split("---")[0] if "---" in path.stem else path.stem.rstrip("0123456789_")
        yield Case(group, path.stem, found["schema"], _tests_of(found))


def of_home() -> Iterator[Case]:
    """Yield the project's own cases. Their schemas resemble users' schemas."""
    for line in HOME.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        yield Case(found["group"], found["name"], found["schema"], _tests_of(found))


def _tests_of(found: dict[str, Any]) -> tuple[tuple[Any, bool], ...]:
    return tuple((test["data"], test["valid"]) for test in found["tests"])


def spellings(value: object) -> Iterator[str]:
    """Yield JSON texts of an instance: without and with spaces, with non-ASCII characters, and with all
    characters escaped.
    """
    yield json.dumps(value, separators=(",", ":"))
    yield json.dumps(value)
    yield json.dumps(value, ensure_ascii=False)
    yield _escaped(value)


def _escaped(value: object) -> str:
    r"""Return the JSON text with every character of every string as \\uXXXX."""
    if isinstance(value, str):
        units = value.encode("utf-16-be", "surrogatepass")
        return '"' + "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)) + '"'
    if isinstance(value, list):
        return "[" + ",".join(_escaped(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_escaped(key)}:{_escaped(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def in_order(value: Any, places: dict[str, int]) -> Any:
    """Return the value with each object's keys in the order in which the schema first names them."""
    if isinstance(value, list):
        return [in_order(item, places) for item in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: places.get(name, len(places)))
    return {name: in_order(value[name], places) for name in names}


def places_of(schema: Any) -> dict[str, int]:
    """Return the rank of each key by its first occurrence in the schema."""
    places: dict[str, int] = {}
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            places.setdefault(each, len(places))
        elif isinstance(each, list):
            waiting += each[::-1]
        elif isinstance(each, dict):
            waiting += [part for name, value in each.items() for part in (name, value)][::-1]
    return places
