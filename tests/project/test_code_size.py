"""Tests the limits for files, functions and type escapes (such as Any). Also tests that the list of
exceptions only shrinks.
"""

import ast

import pytest

from tests.project import code_size as limits

NESTED = """
if True:
    class A:
        @decorated
        def f(self):
            def g():
                pass
"""
ESCAPING = """
from typing import (
    Any,
    cast,
)
x: list[Any] = cast(Any, f())  # type: ignore[attr-defined]
y = "Any"
"""


@pytest.fixture(scope="module")
def today():
    return limits.measured()


def test_nothing_grows_beyond_its_limit(today):
    assert limits.grown(today, limits.listed()) == []


def test_shrunk_entries_are_listed_with_their_present_size(today):
    assert limits.shrunk(today, limits.listed()) == [], (
        "shorten code_size.toml: python -m tests.project.code_size"
    )


def test_copies_in_a_build_folder_are_no_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    for path in ("plugins/a/build/lib/a.py", "plugins/a/a.py", "plugins/build.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert limits.sources(("plugins",)) == [tmp_path / "plugins" / name for name in ("a/a.py", "build.py")]


def test_growth_and_shrinkage_are_found():
    before = {"files": {"a.py": 450}, "functions": {"a.py:f": 80}, "escapes": {"Any": 3}}
    now = {"files": {"b.py": 401}, "functions": {"a.py:f": 81}, "escapes": {"Any": 2}}
    assert limits.grown(now, before) == ["b.py: 401, not listed", "a.py:f: 81, listed with 80"]
    assert limits.shrunk(now, before) == [
        "a.py: listed with 450, today within the limit",
        "Any: listed with 3, today 2",
    ]


def test_nested_functions_are_named_and_measured():
    assert limits.functions(ast.parse(NESTED)) == [("A.f", 3), ("A.f.g", 2)]


def test_escapes_are_counted_in_code_only():
    assert limits.escapes(ESCAPING) == {"Any": 2, "cast": 1, "type: ignore": 1}
