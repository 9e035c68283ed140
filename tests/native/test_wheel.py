"""Tests that an installed wheel works, and that its compiled kernels need no compiler."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mmengine.native import library
from mmengine.native.cache import cache_folder, library_name, wheel_library_name
from mmengine.native.compile import find_compiler, openmp_library
from mmengine.native.cpu import usable_isas
from mmengine.native.errors import NativeKernelsError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_a_compiler(monkeypatch, tmp_path):
    """Set an empty cache folder and a PATH without programs. Yields an empty folder for a wheel's kernels."""
    monkeypatch.setenv("MMENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "BUILT", tmp_path / "built")
    (tmp_path / "built").mkdir()
    yield tmp_path / "built"
    monkeypatch.undo()
    library.forget()


def test_kernels_of_a_wheel_need_no_compiler(monkeypatch, without_a_compiler):
    isa, openmp = usable_isas()[0], openmp_library()
    if openmp is None:
        pytest.skip("no OpenMP here")
    monkeypatch.delenv("MMENGINE_CACHE")
    ours = cache_folder().path / library_name(isa, openmp)
    if not ours.exists():
        pytest.skip("another cache is in use")
    monkeypatch.setenv("MMENGINE_CACHE", str(without_a_compiler.parent / "cache"))
    with pytest.raises(NativeKernelsError):
        find_compiler()
    library.forget()
    assert library.load() is None and "no C++ compiler" in library.describe()
    shutil.copy(ours, without_a_compiler / wheel_library_name(isa))
    library.forget()
    assert library.load() is not None and str(without_a_compiler) in library.describe()


def test_an_unloadable_library_is_ignored(without_a_compiler):
    for isa in usable_isas():
        (without_a_compiler / wheel_library_name(isa)).write_bytes(b"no library")
    library.forget()
    assert library.load() is None and "no C++ compiler" in library.describe()


def ran(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def clone(tmp_path):
    """Return a clone of the repository, without build products."""
    ran("git", "clone", "-q", str(ROOT), str(tmp_path / "clone"))
    return tmp_path / "clone"


def installed(wheel, home, *options):
    """Install the wheel into a new environment, and return its interpreter and site-packages folder."""
    ran(sys.executable, "-m", "venv", "--without-pip", str(home))
    (site,) = home.glob("lib/python3*/site-packages")
    python = home / "bin" / "python"
    ran(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-compile",
        *options,
        str(wheel),
    )
    return python, site


def lend_dependencies(site):
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))


def demo(python, folder, **variables):
    """Run `mmengine demo` with only the given environment variables, and check its output."""
    said = ran(str(python.with_name("mmengine")), "demo", env={"HOME": str(folder), **variables}, cwd=folder)
    assert "verif" in said.lower()


def test_an_installed_wheel_runs_the_demo(tmp_path, clone):
    """To save time, the wheel is built without kernels."""
    wheels, bare = tmp_path / "dist", os.environ | {"MMENGINE_WHEEL_ISAS": ""}
    how = ("--no-deps", "--no-build-isolation", "-q", "-w", str(wheels))
    ran(sys.executable, "-m", "pip", "wheel", *how, str(clone), env=bare)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name.endswith("py3-none-any.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "mmengine/testing/contract.py" in inside and not any("/training/" in name for name in inside)
    python, site = installed(wheel, tmp_path / "home", "--no-deps")
    lend_dependencies(site)
    assert str(site) in ran(str(python), "-c", "import mmengine; print(mmengine.__file__)", cwd=tmp_path)
    demo(python, tmp_path, MMENGINE_CACHE=str(cache_folder().path.parent), PATH=os.environ["PATH"])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_installed_wheel_answers_without_a_compiler(tmp_path, clone):
    """The wheel works without a compiler, and the sdist contains the kernels' sources."""
    ran(sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(clone))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "linux" in wheel.name and not any("/tests/" in name for name in inside)
    kernels = sorted(name.split("/")[-1].split("-")[1] for name in inside if name.endswith(".so"))
    assert kernels == ["amx", "avx2", "avx512", "avx512_bf16"]
    for name in (
        "mmengine/native/src/linear/linear.cpp",
        "mmengine/server/live/live.js",
        "mmengine/replay/report/page.css",
    ):
        assert name in inside
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("mmengine/native/src/linear/linear.cpp") for name in archive.getnames())
    python, site = installed(f"{wheel}[engine]", tmp_path / "home", "-c", str(ROOT / "constraints.txt"))
    bare = {"PATH": str(tmp_path / "nothing"), "MMENGINE_CACHE": str(tmp_path / "cache")}
    told = ran(str(python), "-m", "mmengine.native", env={"HOME": str(tmp_path), **bare}, cwd=tmp_path)
    assert str(site) in told
    demo(python, tmp_path, **bare)
    assert not list((tmp_path / "cache").rglob("*.so")), os.listdir(tmp_path)
