"""Tests that docs/reference/limits.md shows the code's limits, and that tests/project/limits.toml describes
each limit.
"""

import ast
import re
import tomllib
from typing import get_type_hints

import pytest

from mmengine.config import EngineConfig
from mmengine.server.settings import ServerSettings
from tests.project import limits_page, reference_pages

TEXTS = tomllib.loads(limits_page.TEXTS.read_text())


def test_the_page_is_current():
    assert limits_page.PAGE.read_text() == limits_page.page(), "run `make limits`"


@pytest.mark.parametrize(("kind", "struct"), [("engine", EngineConfig), ("server", ServerSettings)])
def test_each_setting_has_a_text_and_a_module_that_names_it(kind, struct):
    assert TEXTS[kind].keys() == limits_page.ranges(struct).keys()
    for name, module in TEXTS[kind].items():
        source = (limits_page.ROOT / "mmengine" / module).read_text()
        assert re.search(rf"\b{name}\b", source), f"{module} does not name {name}"


@pytest.mark.parametrize("struct", [EngineConfig, ServerSettings])
def test_each_setting_is_described_by_a_sentence(struct):
    for name, hint in get_type_hints(struct, include_extras=True).items():
        if name in struct.__struct_fields__:
            text = hint.__metadata__[-1].description
            assert text.endswith(".") and len(text.split()) > 2, name


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_the_generated_pages_are_current(name):
    assert (reference_pages.FOLDER / name).read_text() == reference_pages.PAGES[name](), "run `make limits`"


def test_each_key_of_fixed_limits_is_used():
    found = {key for key, *_ in limits_page.constants(TEXTS["fixed"])}
    assert found == TEXTS["fixed"].keys()


def test_a_constant_is_read_with_its_comment():
    lines = ["# Bytes of one", "# request.", "MAX_BYTES = 4 * 2**20", "MAX_PARTS = 7  # of a message"]
    first, second = ast.parse("\n".join(lines)).body
    assert limits_page.number(first.value, {}) == 4 * 2**20
    assert limits_page.comment(lines, first.lineno) == "Bytes of one request."
    assert limits_page.comment(lines, second.lineno) == "of a message"


def test_limits_that_users_meet_are_on_the_page():
    page = limits_page.page()
    for text in (
        "| `max_waiting` | engine | 4,096 | 1 to 1,048,576 | Waiting requests.",
        "| `max_body_bytes` | server | 64 MiB | 1 KiB to 1 GiB |",
        "| `n` | sampling | 1 | 1 to 64 |",
        "| `MAX_LINE_BYTES` | fixed | 32 MiB |",
    ):
        assert text in page
