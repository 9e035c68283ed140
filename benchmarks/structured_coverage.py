"""Which of JSON Schema is enforced: the JSON-Schema-Test-Suite through the gate and the grammar engine.

    python benchmarks/structured_coverage.py --suite DIR [--backend xgrammar] [--bare] [--verbose]

DIR is a checkout of JSON-Schema-Test-Suite. A text counts as accepted when the bit of every next token
(here: byte) is set in the mask, step by step, and the end of text at its end; bounds are off. A group of
the suite is

    exact             every valid instance is accepted and no invalid one
    refused           the schema is refused, with its keyword and pointer
    over-restrictive  a valid instance is not accepted (no invalid one is)
    wrong             an invalid instance is accepted, in any of several spellings

`format` is an assertion here, as most users of it expect; the file format.json, which says that it is only
an annotation, is counted with the optional files. --bare leaves the gate out. Exit code 1 when a target
is missed.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmengine.errors import InvalidRequest
from mmengine.structured_output.json_schema.gate import Bounds, gate

TARGETS = {"exact": 142, "over-restrictive": 24, "wrong": 0}  # at least, at most, at most
VERDICTS = ("exact", "refused", "over-restrictive", "wrong")
DRAFT = "draft2020-12"


END = 256  # tokens are bytes, and this ends a text
Start = Callable[[str, bool], Any]  # a schema, and whether it is bare, to a matcher; raises InvalidRequest


class Acceptor:
    """Texts against one grammar, byte by byte."""

    def __init__(self, matcher: Any):
        self.matcher = matcher

    def accepts(self, text: str) -> bool:
        matcher = self.matcher.deep_copy()
        for byte in text.encode():
            if not self._allowed(matcher, byte) or not matcher.consume_token(byte):
                return False
        return self._allowed(matcher, END)

    def _allowed(self, matcher: Any, token: int) -> bool:
        return bool(matcher.compute_bitmask()[token >> 3] >> (token & 7) & 1)


class _Bytes:
    """What llguidance reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id, special_token_ids = None, END, [END]
    tokens = [*(bytes([byte]) for byte in range(END)), b"<end>"]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def llguidance_start() -> Start:
    from llguidance import LLMatcher, LLTokenizer  # lazy: one of two engines

    tokenizer = LLTokenizer(_Bytes(), n_vocab=END + 1, eos_token=[END])

    def start(schema: str, bare: bool) -> Any:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise InvalidRequest(matcher.get_error().split("\n")[0])
        return matcher

    return start


def xgrammar_start() -> Start:
    import xgrammar  # lazy: one of two engines

    from mmengine.structured_output.xgrammar_backend import Vocabulary, XGrammar, XMatcher

    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    backend = XGrammar(lambda: tokens, lambda text: list(text.encode()), frozenset(), (END,), END + 1)
    info = xgrammar.TokenizerInfo(tokens, vocab_size=END + 1, stop_token_ids=[END])
    vocabulary = Vocabulary(tokens, lambda text: list(text.encode()), [END], END + 1)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def start(schema: str, bare: bool) -> Any:
        if not bare:
            return backend.compile(f'{{"type":"json_schema","schema":{schema}}}').matcher()
        try:
            compiled = compiler.compile_json_schema(schema, strict_mode=False)
        except RuntimeError as error:
            raise InvalidRequest(str(error)) from None
        return XMatcher(xgrammar.GrammarMatcher(compiled), vocabulary)

    return start


STARTS = {"llguidance": llguidance_start, "xgrammar": xgrammar_start}


def spellings(value: object) -> Iterator[str]:
    """The text of an instance, then texts that mean the same."""
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value)
    yield _escaped(value)


def _escaped(value: object) -> str:
    """Every character of every string as \\uXXXX."""
    if isinstance(value, str):
        units = value.encode("utf-16-be", "surrogatepass")
        return '"' + "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)) + '"'
    if isinstance(value, list):
        return "[" + ",".join(_escaped(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_escaped(key)}:{_escaped(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def verdict(start: Start, group: dict, bare: bool) -> tuple[str, str]:
    """Of a group of the suite, and what it rests on."""
    try:
        schema = json.dumps(group["schema"]) if bare else gate(group["schema"], Bounds.off())
        acceptor = Acceptor(start(schema, bare))
    except InvalidRequest as refused:
        return "refused", str(refused)
    for test in group["tests"]:
        if not test["valid"]:
            for text in spellings(test["data"]):
                if acceptor.accepts(text):
                    return "wrong", text
    for test in group["tests"]:
        text = next(spellings(test["data"]))
        if test["valid"] and not acceptor.accepts(text):
            return "over-restrictive", text
    return "exact", ""


def count(start: Start, paths: list[Path], options: argparse.Namespace) -> dict[str, Counter]:
    """Verdicts by file, which is by keyword."""
    table: dict[str, Counter] = {}
    for path in paths:
        counts = table.setdefault(path.stem, Counter())
        for group in json.loads(path.read_text()):
            found, why = verdict(start, group, options.bare)
            counts[found] += 1
            if options.verbose and found != "exact":
                print(f"{found}: {path.stem}: {group['description']}: {why[:160]}", file=sys.stderr)
    return table


def print_table(title: str, table: dict[str, Counter]) -> Counter:
    total = sum(table.values(), Counter())
    print(f"| {title} | groups | " + " | ".join(VERDICTS) + " |")
    print("|---|---:|" + "---:|" * len(VERDICTS))
    for name, counts in [*table.items(), ("**all**", total)]:
        print(f"| {name} | {counts.total()} | " + " | ".join(str(counts[v]) for v in VERDICTS) + " |")
    print()
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", type=Path, required=True, help="a checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--backend", choices=STARTS, default="llguidance", help="the grammar engine")
    parser.add_argument("--bare", action="store_true", help="the grammar engine alone, without the gate")
    parser.add_argument("--verbose", action="store_true", help="every group that is not exact, on stderr")
    options = parser.parse_args()
    folder = options.suite / "tests" / DRAFT
    required = sorted(path for path in folder.glob("*.json") if path.stem != "format")
    if not required:
        parser.error(f"{folder} has no .json files; is {options.suite} a checkout of the test suite?")
    optional = [folder / "format.json", *sorted((folder / "optional").glob("*.json"))]
    formats = sorted((folder / "optional" / "format").glob("*.json"))
    start = STARTS[options.backend]()
    total = print_table("keyword", count(start, required, options))
    more = print_table("optional", count(start, [path for path in optional if path.exists()], options))
    more += print_table("format", count(start, formats, options))
    good = (
        total["exact"] >= TARGETS["exact"]
        and total["over-restrictive"] <= TARGETS["over-restrictive"]
        and total["wrong"] + more["wrong"] <= TARGETS["wrong"]
    )
    print(
        f"targets (exact at least 142, over-restrictive at most 24, wrong 0): {'held' if good else 'MISSED'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
