"""Tests how tests/project/prose.py measures word rates in documents and docstrings, and reports rates over
their limits. `make check` prints the rates.
"""

from collections import Counter

from tests.project import prose
from tests.project.prose import Prose

PAGE = """# What a page is

It holds one `what of it` and "what of it".

| what | of |
|---|---|

    what of it

```sh
what of it
```

A [link](what/of/it.md) to one of two pages.
"""
MODULE = '''"""Count what is there."""


class Thing:
    """A thing of one kind."""

    def count(self):
        """Return the count."""
        what_of = "it"

    def _hidden(self):
        """Return one of two."""
'''


def test_code_tables_and_quoted_terms_do_not_count():
    words = Counter(prose.words_of(PAGE))
    assert [words[word] for word in ("what", "of", "it", "one", "link")] == [1, 1, 1, 2, 1]


def test_no_bar_is_above_the_goal():
    """Each limit in BARS is at least as strict as here."""
    goal = {"what": 2.0, "of": 20.0, "it": 8.0, "one": 5.0, "behind/those/nobody/whoever": 0.5}
    assert all(bars[name] <= bar for bars in prose.BARS.values() for name, bar in goal.items())


def test_docstrings_and_public_functions_are_counted(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    found = prose.docstring_prose([tmp_path / "module.py"])
    assert found.public_functions == 1 and found.total == 16
    assert found.words["what"] == 1 and found.words["it"] == 0
    assert found.rate("of") == 1000 * 2 / 16 and found.rate("what/one") == 1000 * 3 / 16


def test_a_rate_over_its_bar_and_too_few_words_are_reported():
    words = Counter({"what": 30, "count": 970})
    reported = prose.problems({"documents": Prose(words), "docstrings": Prose(Counter(blocks=1000), 1000)})
    assert reported == [
        f"documents: what 30.0 per 1,000 words; the bar is {prose.BARS['documents']['what']}",
        f"docstrings: 1.0 words per public function; the bar is {prose.FEWEST_WORDS_PER_FUNCTION}",
    ]
