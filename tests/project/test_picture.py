"""Tests that docs/images/architecture.svg shows the present packages and imports."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def picture():
    return runpy.run_path(str(ROOT / "docs" / "site" / "picture.py"))


@pytest.mark.long
def test_the_picture_is_current(picture):
    assert picture["PICTURE"].read_text() == picture["draw"](), "run `make picture`"


def test_each_package_has_a_purpose(picture):
    packages = {path.parent.name for path in (ROOT / "mmengine").glob("*/__init__.py")} - picture["LEFT_OUT"]
    assert picture["PURPOSES"].keys() == packages | {"plugins"}


def test_a_transitive_edge_is_omitted(picture):
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert picture["reduced"](graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert picture["levels"](graph) == [["a"], ["b"], ["c"]]
    with pytest.raises(SystemExit, match="import each other"):
        picture["levels"]({"a": {"b"}, "b": {"a"}})
