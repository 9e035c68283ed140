"""Before gpu_check.py, with the standard library alone: what is missing here, and entry points for a
checkout that is not installed.

    python gpu_setup.py FOLDER      FOLDER is on PYTHONPATH
"""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

NOT_NEEDED = {"av", "huggingface_hub"}  # for video files and for models from the hub
ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = [each for each in _required(project["dependencies"]) if not _installed(each)]
    if missing:
        print(_how_to_bring(missing), file=sys.stderr)
        return 1
    groups = project["entry-points"]
    if not all(metadata.entry_points(group=group) for group in groups):
        _write_dist_info(folder / f"{project['name'].replace('-', '_')}-0.dist-info", project["name"], groups)
    return 0


def _required(dependencies: list[str]) -> list[str]:
    return [each for each in dependencies if _name(each) not in NOT_NEEDED]


def _name(dependency: str) -> str:
    return re.split(r"[^\w.-]", dependency, maxsplit=1)[0]


def _installed(dependency: str) -> bool:
    """Whether it is there, and no older than asked for: `name>=1.9,<2`."""
    try:
        version = metadata.version(_name(dependency))
    except metadata.PackageNotFoundError:
        return False
    least = re.search(r">=([\d.]+)", dependency)
    return least is None or _numbers(version) >= _numbers(least[1])


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.match(r"[\d.]*\d", version)[0].split(".")]


def _how_to_bring(missing: list[str]) -> str:
    quoted = " ".join(f"'{each}'" for each in missing)
    names = " ".join(map(_name, missing))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"missing here, or too old: {quoted}. With a network: {sys.executable} -m pip install {quoted}\n"
        f"Without one, on a machine that has it: python benchmarks/gpu_bring.py --python {version} {names}\n"
        "and bring the folder .whl with the checkout: gpu.sh takes what lies in it"
    )


def _write_dist_info(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """The least that importlib.metadata needs to find the plugins of a checkout."""
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="utf-8")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
