"""docs/reference/limits.md is what the code says, and says something of each limit."""

import re

import pytest

from tests.project import limits_page as write_limits
from tests.project.limit_sources import Sources

MODULE = """
from mmengine.other import refuse, Refused

MAX_THINGS = 4 * 2**20  # of one request
# Seconds of one,
# and no more.
STEP_LIMIT_S = MAX_THINGS // 2
MAX_TOLD = 7
MAX_UNTOLD = 9
_MAX_HIDDEN = 1


def check(things, config):
    if len(things) > MAX_THINGS:
        raise Refused("there are far too many things")
    check_told(things, MAX_TOLD)
    raise Refused(f"a step took {things} seconds, more than {STEP_LIMIT_S:,}")


def check_told(things, most):
    if len(things) > most:
        refuse(f"at most {most} of {things} are taken")
"""


@pytest.fixture(scope="module")
def page():
    return write_limits.page()


def test_the_page_is_what_the_code_says(page):
    assert write_limits.PAGE.read_text() == page, "run `make limits`"


def test_each_limit_has_a_comment_or_is_told(page):
    rows = [line for line in page.splitlines() if line.startswith("| `") and line.count(" | ") >= 3]
    assert len(rows) > 120
    assert not [row for row in rows if re.search(r"\|  \|  \|$", row)], "say in a comment what it bounds"


def test_what_is_said_is_found_from_its_limit(tmp_path):
    (tmp_path / "mmengine").mkdir()
    (tmp_path / "mmengine" / "things.py").write_text(MODULE)
    sources = Sources(tmp_path)
    found = {each.name: each for each in sources.limits()}
    assert found.keys() == {"MAX_THINGS", "STEP_LIMIT_S", "MAX_TOLD", "MAX_UNTOLD"}
    assert [each.value for each in found.values()] == [4 * 2**20, 2 * 2**20, 7, 9]
    assert found["MAX_THINGS"].comment == "of one request"
    assert found["STEP_LIMIT_S"].comment == "Seconds of one, and no more."
    said = {name: sources.said_of_constant(each) for name, each in found.items()}
    assert said == {
        "MAX_THINGS": ["there are far too many things"],
        "STEP_LIMIT_S": ["a step took … seconds, more than 2,097,152"],
        "MAX_TOLD": ["at most 7 of … are taken"],
        "MAX_UNTOLD": [],
    }


def test_limits_that_strangers_meet_are_told(page):
    for text in (
        "| `max_waiting` | 4,096 | 1 to 1,048,576 |",
        "(max_waiting); try again later`",
        "a step got no further for … seconds (step_timeout_s)",
        "| `MAX_LINE_BYTES`, request_lines.py | 32 MiB |",
        "longer than 32 MiB; name large media by their path",
    ):
        assert text in page
