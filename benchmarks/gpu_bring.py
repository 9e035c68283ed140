"""Fill the folder .whl with the wheels that gpu.sh needs on a machine without a network.

    python benchmarks/gpu_bring.py [--python 3.12] [NAME ...]

Run this command on a machine with a network. NAME: packages that the GPU machine lacks (default: the packages
missing in an image with torch, transformers and pytest). The command also downloads FlashInfer. It removes
kernel sources that this project never calls, so the wheel shrinks from 60 MB to 20 MB.
"""

import argparse
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".whl"
LACKING = ("llguidance", "msgspec", "structlog", "zstandard")
FLASHINFER = ("flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.15.post2")
# Unused files in FlashInfer 0.7.2: kernels for other GPUs and models, mixtures of experts, and examples.
UNCALLED = re.compile(
    r"flashinfer/(experimental/.*(?<!\.py)$|moe_ep/kernel_src/|fused_moe/.*\.(json|csv|bin|cubin)$"
    r"|data/cutlass/(examples|tools/(?!util/include)|test|docs|media|python)/"
    r"|data/csrc/(cake|kda|gdn|blackwell|alphamoe|minimax|kimi|experimental|fused_moe|nv_internal|mamba|xqa))"
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill .whl for a machine without a network.")
    parser.add_argument("--python", default="3.12", help="Python version of that machine (default 3.12)")
    parser.add_argument("--machine", default="x86_64", help="`uname -m` of that machine (default x86_64)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="packages that the machine lacks")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    wanted = with_versions(options.names or LACKING, dependencies)
    FOLDER.mkdir(exist_ok=True)
    subprocess.run([*download(options.python, options.machine), *wanted, *FLASHINFER], check=True)
    for wheel in FOLDER.glob("flashinfer_python-*.whl"):
        slim(wheel)
    print(f"{FOLDER}: {sum(path.stat().st_size for path in FOLDER.glob('*.whl')) / 2**20:.1f} MiB")
    return 0


def with_versions(names: list[str], dependencies: list[str]) -> list[str]:
    """Return pip requirements: each name with the version range that the project declares."""
    requirements = {re.split(r"[^\w.-]", line, maxsplit=1)[0]: line for line in dependencies}
    return [requirements.get(name, name) for name in names]


def download(python: str, machine: str) -> list[str]:
    """Return the `pip download` command. pip matches a platform tag exactly, so the command lists every
    usable tag.
    """
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(39, 16, -1)]
    listed = [word for name in (*platforms, f"manylinux2014_{machine}") for word in ("--platform", name)]
    words = ("--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python)
    return [sys.executable, "-m", "pip", "download", "--quiet", *words, *listed, "-d", str(FOLDER)]


def slim(wheel: Path) -> None:
    """Remove the files that UNCALLED matches from the wheel and from its RECORD."""
    thinner = wheel.with_suffix(".thinner")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(thinner, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            data = old.read(entry)
            if UNCALLED.match(entry.filename):
                continue
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not UNCALLED.match(line.rsplit(",", 2)[0])).encode()
            new.writestr(entry, data)
    thinner.replace(wheel)


if __name__ == "__main__":
    sys.exit(main())
