"""Count the functions of the Berkeley Function Calling Leaderboard whose parameters can be enforced.

    pip install --no-deps --target DIR bfcl-eval
    python -m benchmarks functions --data DIR/bfcl_eval/data
    python -m benchmarks functions                    the sample in tests/server

The functions use their own type names (dict, float, tuple, ArrayList, …). Like bfcl-eval, this program
converts them to JSON Schema. Equal schemas are counted once. Exits with 1 if a check raises an unexpected
error, or if a refusal names no keyword and no position inside the schema.
"""

import argparse
import copy
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mmengine.structured_output.report.report import SchemaReport, check_schema

SAMPLE = Path(__file__).resolve().parents[2] / "tests" / "server" / "functions_sample.jsonl"
_OBJECTS = ("dict", "object", "HashMap", "Hashtable")
_ARRAYS = ("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack")
_INTEGERS = ("integer", "byte", "short", "long", "Bigint")
_NUMBERS = ("number", "float", "double")
TYPES = {  # any other type is a string
    **dict.fromkeys(_OBJECTS, "object"),
    **dict.fromkeys(_ARRAYS, "array"),
    **dict.fromkeys(_INTEGERS, "integer"),
    **dict.fromkeys(_NUMBERS, "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
}


def as_tool(function: dict) -> dict:
    """Return a function as bfcl-eval passes it to an API: with JSON Schema's types, and underscores for the
    dots in its name.
    """
    parameters = copy.deepcopy(function["parameters"])
    parameters["type"] = "object"
    for each in parameters["properties"].values():
        _cast(each)
    kept = {name: each for name, each in function.items() if name != "response"}  # APIs have no such field
    return {**kept, "name": function["name"].replace(".", "_"), "parameters": parameters}


def _cast(schema: dict) -> None:
    """Convert the types in a property as bfcl-eval does: in `properties` recursively, in `items` two levels
    deep.
    """
    schema["type"] = TYPES.get(schema.get("type", "string"), "string")
    if schema["type"] not in ("array", "object"):
        return
    if "properties" in schema:
        for each in schema["properties"].values():
            _cast(each)
    elif "items" in schema:
        items = schema["items"]
        items["type"] = TYPES.get(items["type"], "string")
        if items["type"] == "array" and "items" in items:
            items["items"]["type"] = TYPES.get(items["items"]["type"], "string")
        elif items["type"] == "object" and "properties" in items:
            for each in items["properties"].values():
                _cast(each)


def functions_in(path: Path) -> Iterator[dict]:
    """Yield the functions in a JSON Lines file or a bfcl-eval folder, without duplicate schemas."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    seen = set()
    for file in files:
        for function in _functions_of(file):
            tool = as_tool(function)
            text = json.dumps(tool["parameters"], sort_keys=True)
            if text not in seen:
                seen.add(text)
                yield tool


def _functions_of(file: Path) -> Iterator[dict]:
    for line in file.read_text().splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # a file that is not one JSON value per line
            return
        cases = found.get("function", found) if isinstance(found, dict) else ()
        for each in cases if isinstance(cases, list) else [cases]:
            if isinstance(each, dict) and isinstance(each.get("parameters"), dict):
                yield each


def checked(function: dict) -> SchemaReport | str:
    """Return the report on a function's parameters, or the text of an unexpected error that the check
    raised.
    """
    try:
        return check_schema(function["parameters"])
    except Exception as error:  # any error here is a finding
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=SAMPLE)
    parser.add_argument("--verbose", action="store_true", help="every function that is not exact, on stderr")
    given = parser.parse_args()
    verdicts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for function in functions_in(given.data):
        report = checked(function)
        verdict = "crashed" if isinstance(report, str) else report.verdict
        if isinstance(report, SchemaReport) and verdict == "refused":
            verdict = "refused" if report.keyword or report.pointer != "#" else "refused without a place"
            refused[report.keyword or "a contradiction of several"] += 1
        verdicts[verdict] += 1
        if given.verbose and verdict != "exact":
            print(f"{function['name']}: {report}"[:400], file=sys.stderr)
    print(f"{sum(verdicts.values())} schemas of {given.data.name}")
    for verdict, count in verdicts.most_common():
        print(f"  {verdict}: {count}")
    for keyword, count in refused.most_common():
        print(f"  refused by {keyword}: {count}")
    sys.exit(bool(verdicts["crashed"] or verdicts["refused without a place"]))


if __name__ == "__main__":
    main()
