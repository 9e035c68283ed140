"""What a wheel brings: kernels that need no compiler, and a command that works where it is installed."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mmengine.native import library
from mmengine.native.cache import built_name, cache_folder, library_name
from mmengine.native.compile import find_compiler, openmp_library
from mmengine.native.cpu import usable_isas
from mmengine.native.problem import NativeProblem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_a_compiler(monkeypatch, tmp_path):
    """An empty cache, and nothing on the path."""
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
    if openmp is None or library.load() is None:
        pytest.skip("no kernels here")
    monkeypatch.delenv("MMENGINE_CACHE")
    ours = cache_folder().path / library_name(isa, openmp)
    if not ours.exists():
        pytest.skip("another cache is in use")
    monkeypatch.setenv("MMENGINE_CACHE", str(without_a_compiler.parent / "cache"))
    with pytest.raises(NativeProblem):
        find_compiler()
    library.forget()
    assert library.load() is None and "no C++ compiler" in library.describe()
    shutil.copy(ours, without_a_compiler / built_name(isa))
    library.forget()
    assert library.load() is not None and str(without_a_compiler) in library.describe()


def test_a_library_that_does_not_load_is_none(without_a_compiler):
    for isa in usable_isas():
        (without_a_compiler / built_name(isa)).write_bytes(b"no library")
    library.forget()
    assert library.load() is None and "no C++ compiler" in library.describe()


def ran(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_installed_wheel_answers_without_a_compiler(tmp_path):
    """Its dependencies are those of this environment. The sdist holds what the wheel was built of."""
    clone = tmp_path / "clone"
    ran("git", "clone", "-q", str(ROOT), str(clone))
    build = (sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(clone))
    ran(*build)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "linux" in wheel.name and not any("/tests/" in name for name in inside)
    kernels = sorted(name.split("/")[-1].split("-")[1] for name in inside if name.endswith(".so"))
    assert kernels == ["amx", "avx2", "avx512", "avx512_bf16"]
    for name in (
        "mmengine/native/src/linear.cpp",
        "mmengine/server/live/live.js",
        "mmengine/replay/report/page.css",
    ):
        assert name in inside
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("mmengine/native/src/linear.cpp") for name in archive.getnames())
    home = tmp_path / "home"
    ran(sys.executable, "-m", "venv", "--without-pip", str(home))
    (site,) = home.glob("lib/python3*/site-packages")
    ran(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel))
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    python = home / "bin" / "python"
    bare = {
        "HOME": str(tmp_path),
        "PATH": str(tmp_path / "nothing"),
        "MMENGINE_CACHE": str(tmp_path / "cache"),
    }
    assert str(site) in ran(str(python), "-m", "mmengine.native", env=bare, cwd=tmp_path)
    demo = ran(str(python), "-m", "mmengine.cli.main", "demo", env=bare, cwd=tmp_path)
    assert "verif" in demo.lower()
    assert not list((tmp_path / "cache").rglob("*.so")), os.listdir(tmp_path)
