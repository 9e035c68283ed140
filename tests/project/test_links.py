"""Tests that links and paths in the documents exist, and that the documents name every page, dependency,
decision and folder that they should list.
"""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "plugins/**/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
    if "renames" not in str(page.relative_to(ROOT))  # Pages about renames mention deleted files.
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`([\w./*-]+\.(?:py|cpp|h|js|md|sh|toml))`")
TREES = ("", "mmengine", "plugins", "docs", "tests")  # Paths in a document may be relative to these folders.
FOLDERS = (*TREES[1:], "benchmarks", "examples")
FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {
    path.name for path in ROOT.glob("*.*")
}
# Files that are not in the repository: a file of FlashAttention's, and files that `mmengine log minimize`
# writes.
FOREIGN_FILES = {"flash_fwd_kernel.h", "small/test_minimized_encoder.py", "test_minimized_FAULT.py"}


def prose(page):
    """Return a page without its fenced code blocks, where brackets are not links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Return a page's anchors: the headings' anchors, and explicit anchors (`<a id=…>`)."""
    text = prose(page)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    names = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="([^"]+)">', text))


def problems(page):
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        if not found.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(found):
            yield f"{target}: no such heading"


def is_file(path):
    """Return whether a path names a file. It may be relative to the root or to a folder in TREES, or be the
    file's name alone.
    """
    if "/" not in path and "*" not in path:
        return path in FILES
    return any(next((ROOT / tree).glob(path), None) for tree in TREES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    assert not list(problems(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    named = set(PATH.findall(prose(page))) - FOREIGN_FILES
    assert not [path for path in sorted(named) if not is_file(path)]


def test_broken_links_and_paths_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](#one-thing) [b](#another) [c](page.md) [d](gone.md) `core/gone.py`\n")
    assert list(problems(page)) == ["#another: no such heading", "gone.md: no such file"]
    assert not is_file("core/gone.py") and not is_file("gone.py") and is_file("core/fold/evolve.py")


def test_every_page_is_in_the_navigation_of_the_site():
    settings = (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    navigation = re.findall(r"^ +- (?:[\w ]+: )?([\w/.-]+\.md)$", settings, flags=re.MULTILINE)
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    source = (ROOT / "mmengine" / "__init__.py").read_text()
    names = re.findall(r'"(\w+)": "mmengine', source.partition("_HOMES")[2].partition("}")[0])
    assert names and not (pages | {f"api/{name}.md" for name in names}) - set(navigation)
    written = ("api/", "benchmarks/results/index.md")  # docs/site/stage.py writes these.
    assert not [page for page in navigation if not page.startswith(written) and not (ROOT / page).is_file()]
    assert len(navigation) == len(set(navigation))


def test_each_dependency_has_a_line_in_the_decisions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [line for extra in project["project"]["optional-dependencies"].values() for line in extra]
    names = {re.match(r"[\w.-]+", line)[0] for line in wanted} - {project["project"]["name"]}
    table = re.findall(
        r"^\| ([^|]+) \|", (ROOT / "docs/explanation/decisions/project.md").read_text(), flags=re.MULTILINE
    )
    listed = {name.partition(" (")[0].strip() for cell in table for name in cell.split(",")}
    assert not names - listed


def test_every_decision_has_a_line_in_the_index():
    index = ROOT / "docs/explanation/decisions.md"
    linked = {target for target in LINK.findall(index.read_text()) if "#" in target}
    for page in (ROOT / "docs/explanation/decisions").glob("*.md"):
        title, *headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert slugs == {
            name.partition("#")[2] for name in linked if name.startswith(f"decisions/{page.name}#")
        }


def test_the_architecture_names_every_folder_and_every_layer():
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    table = set(re.findall(r"`([\w/.]+)`", "".join(re.findall(r"^\|([^|]*)\|", text, flags=re.MULTILINE))))
    for parent in ("mmengine", "mmengine/runtime"):
        folders = {f"{path.parent.name}/" for path in (ROOT / parent).glob("*/__init__.py")}
        assert not folders - table, parent
    assert not [
        path.parent.name
        for path in (ROOT / "mmengine/core").glob("*/__init__.py")
        if f"{path.parent.name}/" not in text
    ]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["name"] == "packages import only lower layers")
    names = [name.strip().removeprefix("mmengine.") for layer in layers for name in layer.split("|")]
    assert not [name for name in names if not {f"{name}/", f"{name}.py"} & table]
