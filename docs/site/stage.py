"""Copy the pages of the site into a folder and write an index and a page for each public Python name.

python docs/site/stage.py build/site/pages     (`make docs` runs this command)

Pages keep their paths, so links between them stay valid. Linked files that are no pages are copied too.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
FOLDERS = ("docs", "benchmarks/results", "plugins", "deploy")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_REFERENCE = """# {name}

::: {home}.{name}
"""


def exported() -> dict[str, str]:
    """Return the public names of `mmengine` and their modules, read from the source without an import."""
    tree = ast.parse((ROOT / "mmengine" / "__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            return ast.literal_eval(node.value)
    raise SystemExit("mmengine/__init__.py has no _HOMES")


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    sources = [ROOT / name for name in PAGES]
    sources += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")]
    for source in sources:
        text = _LINK.sub(lambda found, at=source: _linked(found, at, out), source.read_text("utf-8"))
        write(out / source.relative_to(ROOT), text)
    shutil.copytree(ROOT / "docs" / "images", out / "docs" / "images", dirs_exist_ok=True)
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    listed = "".join(f"* [{path.stem}]({path.name})\n" for path in results)
    write(out / "benchmarks" / "results" / "index.md", f"# Measured\n\n{listed}")
    names = exported()
    listed = "".join(f"* [{name}]({name}.md)\n" for name in sorted(names))
    write(out / "api" / "index.md", f"# Python API\n\nThe public names of `import mmengine`.\n\n{listed}")
    for name, home in names.items():
        write(out / "api" / f"{name}.md", _REFERENCE.format(name=name, home=home))


def _linked(found: re.Match[str], source: Path, out: Path) -> str:
    """Return a link for the site, and copy or index its target. Exits if the target does not exist."""
    target, hash_sign, anchor = found[2].partition("#")
    if not target or ":" in target:
        return found[0]
    path = (source.parent / target).resolve()
    if not path.exists() or not path.is_relative_to(ROOT):
        raise SystemExit(f"{source.relative_to(ROOT)} links to {target}, which does not exist")
    if path.is_dir():
        target = f"{target.rstrip('/')}/index.md"
        if not path.samefile(ROOT / "benchmarks" / "results"):
            listed = "".join(f"* `{each.name}`\n" for each in sorted(path.iterdir()) if each.is_file())
            write(out / path.relative_to(ROOT) / "index.md", f"# {path.name}\n\n{listed}")
    elif path.suffix != ".md":
        copy = out / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return f"{found[1]}{target}{hash_sign}{anchor}{found[3]}"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
