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
ROOT = Path(__file__).resolve().parents[1]


def main(folder: Path) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = [name for name in _required(project["dependencies"]) if not _installed(name)]
    if missing:
        print(_how_to_bring(missing), file=sys.stderr)
        return 1
    groups = project["entry-points"]
    if not all(metadata.entry_points(group=group) for group in groups):
        _write_dist_info(folder / f"{project['name'].replace('-', '_')}-0.dist-info", project["name"], groups)
    return 0


def _required(dependencies: list[str]) -> list[str]:
    names = [re.split(r"[^\w.-]", dependency, maxsplit=1)[0] for dependency in dependencies]
    return [name for name in names if name not in NOT_NEEDED]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _how_to_bring(missing: list[str]) -> str:
    names = " ".join(missing)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    platforms = "--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64"
    return (
        f"missing here: {names}. With a network: {sys.executable} -m pip install {names}\n"
        "Without one, on a machine that has it:\n"
        f"  python3 -m pip download --no-deps --only-binary=:all: --python-version {version} {platforms} "
        f"-d .whl {names}\n"
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
