"""Tests that no code branches on an error's text. Code may branch on an error's code, or on the path to the
invalid field (mmengine/errors.py).
"""

import ast
from pathlib import Path

import pytest

from tests.project import code_size

ROOT = Path(__file__).parents[2]
# String methods (TESTS) and regular expression functions (MATCHES) that examine a text. `partition` is
# allowed, to display a text's first line.
TESTS = ("startswith", "endswith", "find", "rfind", "index", "removeprefix", "removesuffix", "replace")
MATCHES = ("match", "search", "fullmatch", "findall", "finditer", "sub", "split")
# Attributes that hold an error's text.
TEXTS = ("args", "text", "message", "detail", "reason", "why")
# Variables that hold an error or its text.
NAMES = ("error", "exception", "failure", "refusal", "detail", "why")
# Modules that must read error texts, and the libraries whose texts they read. These libraries report some
# conditions only as a sentence.
ADAPTERS = {
    "mmengine/decode_errors.py": "msgspec",
    "mmengine/structured_output/engines/llguidance/compile_errors.py": "llguidance",
    "mmengine/structured_output/engines/llguidance/backend.py": "llguidance",
    "mmengine/structured_output/engines/engine_errors.py": "llguidance, xgrammar",
}
SOURCES = [str(path.relative_to(ROOT)) for path in code_size.sources(("mmengine", "plugins"))]


def caught_names(tree):
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}


class Finder:
    """Finds the expressions in a module that examine an error's text."""

    def __init__(self, tree):
        self.tree, self.names = tree, {*NAMES, *caught_names(tree)}

    def is_text(self, node):
        """Return whether an expression may be an error or its text."""
        match node:
            case ast.Name(id=name):
                return name in self.names
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
                return name in self.names
            case ast.Call(func=ast.Attribute(value=value)) | ast.Subscript(value=value):
                return self.is_text(value)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                return name in self.names and attribute in TEXTS
        return False

    def is_test(self, node):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=method), args=arguments):
                if method in TESTS and self.is_text(value):
                    return True
                return method in MATCHES and any(map(self.is_text, arguments))
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[container]):
                return self.is_text(container)
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(str(value))]):
                return " " in value and self.is_text(left)
        return False

    def found(self):
        return [f"{node.lineno}: {ast.unparse(node)}" for node in ast.walk(self.tree) if self.is_test(node)]


def find_text_tests(source):
    return Finder(ast.parse(source)).found()


@pytest.mark.parametrize(
    "source",
    (
        "try: f()\nexcept ValueError as e:\n    a = str(e).startswith('x')",
        "try: f()\nexcept ValueError as e:\n    a = 'x' in str(e)",
        "re.match('x', str(error))",
        "PATTERN.search(error.message)",
        "error.args[0].endswith('x')",
        "'x' in error.text",
        "detail.removeprefix('x')",
        "error.text == 'the queue is full'",
    ),
)
def test_a_test_of_a_text_is_found(source):
    assert len(find_text_tests(source)) == 1


@pytest.mark.parametrize(
    "source", ("str(error).partition('\\n')[0]", "error.code == 'x'", "error.path[:1] == ('x',)", "a in b")
)
def test_other_expressions_are_not_found(source):
    assert not find_text_tests(source)


def test_no_module_tests_the_text_of_an_error():
    found = {name: find_text_tests((ROOT / name).read_text()) for name in SOURCES if name not in ADAPTERS}
    assert not {name: tests for name, tests in found.items() if tests}


def test_each_adapter_reads_texts():
    assert all(find_text_tests((ROOT / name).read_text()) for name in ADAPTERS)
