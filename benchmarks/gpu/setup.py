"""Prepare a checkout for the GPU check. Needs only Python's standard library.

    python benchmarks/gpu/setup.py FOLDER      FOLDER must be on PYTHONPATH

If packages are missing, the program prints them and exits with 1. If mmengine is not installed, the program
writes mmengine's entry points to FOLDER.
"""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

NOT_NEEDED = {"av", "huggingface_hub"}  # needed only for video files and for models from the hub
ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    missing = [each for each in _required(dependencies) if not _installed(each)]
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
    """Return whether a package is installed, in at least the required version.

    Only the lower limit is checked: `>=1.9` of `name>=1.9,<2`.
    """
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
        f"Without a network, on another machine: python benchmarks/gpu_bring.py --python {version} {names}\n"
        "and copy the folder .whl into this checkout: gpu.sh installs its wheels"
    )


def _write_dist_info(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Write the metadata with which importlib.metadata finds a checkout's plugins."""
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="utf-8")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
