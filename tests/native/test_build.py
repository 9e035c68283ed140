"""Tests that the kernel library is compiled once. After a failure, the kernels are off and one line is
logged.
"""

import logging
import os
import re
import shutil
import subprocess
import sys

import pytest

from mmengine.native import compile as native_compile
from mmengine.native import cpu, library
from mmengine.native.cache import CacheFolder, ensure_compiled
from mmengine.native.errors import NativeKernelsError
from mmengine.strict_modes import open_strict

SOURCE = 'extern "C" int mm_allow_amx() { return 1; }\nextern "C" int mm_answer() { return 42; }\n'
LINE = "CPU kernels are off, so torch computes, which is slower: "
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in native_compile.NAMES), reason="no C++ compiler here"
)


@pytest.fixture
def native(tmp_path, monkeypatch):
    """Set up a folder with two small source files and an empty cache, and yield the folder."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text(SOURCE)
    (sources / "two.cpp").write_text("int mm_unused() { return 1; }\n")
    monkeypatch.setattr(native_compile, "SOURCES", sources)
    monkeypatch.setenv("MMENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MMENGINE_NATIVE", raising=False)
    monkeypatch.delenv("MMENGINE_NATIVE_ISA", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    library.forget()
    yield tmp_path
    monkeypatch.undo()
    library.forget()


def script(folder, text):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def problem(caplog):
    """Check that the library cannot be loaded and that one line is logged. Return the reason in this line."""
    with caplog.at_level(logging.WARNING, logger="mmengine"):
        assert library.load() is None
        assert library.load() is None, "a second call logs nothing"
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith(LINE)]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert library.describe() == f"off: {lines[0].removeprefix(LINE)}"
    return lines[0].removeprefix(LINE)


@needs_compiler
def test_the_library_is_compiled_once_and_then_needs_no_compiler(native, monkeypatch):
    assert library.load().mm_answer() == 42
    made = sorted((native / "cache" / "native").glob("*.so"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.forget()
    assert library.load().mm_answer() == 42
    assert sorted((native / "cache" / "native").glob("*.so")) == made and len(made) == 1


@needs_compiler
def test_changed_sources_give_another_library(native):
    assert library.load().mm_answer() == 42
    (native / "src" / "one.cpp").write_text(SOURCE.replace("42", "43"))
    library.forget()
    assert library.load().mm_answer() == 43


def test_the_kernels_can_be_switched_off(native, monkeypatch, caplog):
    monkeypatch.setenv("MMENGINE_NATIVE", "off")
    assert library.load() is None and library.describe() == "off: MMENGINE_NATIVE=off"
    assert not caplog.records, "nothing is logged, because the user has switched the kernels off"


def test_no_compiler(native, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(native))
    assert "no C++ compiler" in problem(caplog)


def test_a_missing_compiler(native, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX names no-such-compiler" in problem(caplog)


def test_a_compiler_that_fails(native, monkeypatch, caplog):
    text = "echo 'In file included' >&2; echo 'one.cpp:1: error: no such thing' >&2; exit 1"
    monkeypatch.setenv("CXX", script(native, text))
    assert "failed: one.cpp:1: error: no such thing" in problem(caplog)
    assert not list((native / "cache").rglob("*.so"))


def test_a_compiler_that_hangs(native, monkeypatch, caplog):
    monkeypatch.setenv("CXX", script(native, "exec sleep 100"))
    monkeypatch.setenv("MMENGINE_NATIVE_TIMEOUT_S", "0.3")
    assert "did not finish within" in problem(caplog)


def test_a_compiler_that_failed_is_not_waited_for_again(native, monkeypatch, caplog):
    counter = native / "count"
    compiler = script(native, f"echo x >> {counter}; exit 1")
    monkeypatch.setenv("CXX", compiler)
    first = problem(caplog)
    tries = len(counter.read_text().split())
    for _ in range(2):
        caplog.clear()
        library.forget()
        assert problem(caplog).startswith(f"{first} (not tried again today; to try, delete ")
        assert len(counter.read_text().split()) == tries
    os.utime(compiler, ns=(1, 1))  # As if the compiler was repaired or updated.
    caplog.clear()
    library.forget()
    assert problem(caplog) == first


def test_a_compiler_that_writes_rubbish(native, monkeypatch, caplog):
    text = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    monkeypatch.setenv("CXX", script(native, text))
    assert "does not load" in problem(caplog)


def test_a_compiler_that_writes_nothing(native, monkeypatch, caplog):
    monkeypatch.setenv("CXX", script(native, "exit 0"))
    assert "cannot be written to" in problem(caplog)


def test_an_old_cpu(native, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"sse2", "avx"}))
    assert "no AVX2" in problem(caplog)


def test_an_instruction_set_that_this_cpu_lacks(native, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(cpu.NEEDS["avx2"]))
    monkeypatch.setenv("MMENGINE_NATIVE_ISA", "amx")
    assert "does not have it" in problem(caplog)


def test_an_unknown_instruction_set(native, monkeypatch, caplog):
    monkeypatch.setenv("MMENGINE_NATIVE_ISA", "sse9")
    assert "use avx2, avx512, avx512_bf16, amx" in problem(caplog)


def test_lower_instruction_sets_come_after_better_ones(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(cpu.NEEDS["amx"]))
    assert cpu.usable_isas() == ["amx", "avx512_bf16", "avx512", "avx2"]
    monkeypatch.setenv("MMENGINE_NATIVE_ISA", "avx512")
    assert cpu.usable_isas() == ["avx512", "avx2"]


@needs_compiler
def test_a_system_that_refuses_amx_gets_the_next_best(native, monkeypatch):
    if "amx" not in cpu.usable_isas():
        pytest.skip("this CPU has no AMX")
    (native / "src" / "one.cpp").write_text(SOURCE.replace("return 1", "return 0"))
    assert library.load().mm_answer() == 42
    assert library.describe().startswith("avx512_bf16")


def test_a_cache_folder_that_cannot_be_made(native, monkeypatch, caplog):
    (native / "file").touch()
    monkeypatch.setenv("MMENGINE_CACHE", str(native / "file" / "cache"))
    assert "cannot be created" in problem(caplog) and not list(native.rglob("*.so"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_folder_that_is_read_only(native, caplog):
    (native / "cache" / "native").mkdir(parents=True, mode=0o700)
    (native / "cache" / "native").chmod(0o500)
    assert "cannot be written to" in problem(caplog)


def test_a_file_system_that_is_read_only(native, monkeypatch, caplog):
    def refuse(path):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(library, "compile_library", lambda compiler, isa, openmp, out: refuse(out))
    assert "cannot be written to (Read-only file system); name another folder with MMENGINE_CACHE" in (
        problem(caplog)
    )


def test_a_cache_folder_that_others_can_write_to(native, caplog):
    folder = native / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert problem(caplog) == (
        f"the cache folder {folder} is not safe for executable code: {folder} can be written by others: "
        f"chmod go-w {folder}, or name another folder with MMENGINE_CACHE"
    )


@needs_compiler
def test_a_cache_below_a_folder_that_others_can_write_to(native, monkeypatch, caplog):
    """The cache is refused, because other users could replace its folder."""
    open_to_all = native / "open"
    monkeypatch.setenv("MMENGINE_CACHE", str(open_to_all / "mine" / "cache"))
    (open_to_all / "mine").mkdir(parents=True, mode=0o700)
    open_to_all.chmod(0o777)
    said = problem(caplog)
    assert f"{open_to_all} can be written by others: chmod go-w {open_to_all}, or name" in said
    assert not list(native.rglob("*.so"))
    open_to_all.chmod(0o1777)  # Like /tmp: other users cannot replace our folder.
    library.forget()
    assert library.load().mm_answer() == 42


@needs_compiler
def test_the_checked_folder_is_the_loaded_one(native, monkeypatch):
    """The library is loaded from the checked folder, even if another folder gets the same path after the
    check.
    """
    assert library.load().mm_answer() == 42
    library.forget()
    real = library.cache_folder

    def moved():
        folder = real()
        (native / "cache").rename(native / "moved")
        (native / "cache" / "native").mkdir(parents=True)
        for path in (native / "moved" / "native").glob("kernels-*"):
            (native / "cache" / "native" / path.name).write_bytes(b"theirs")
        return folder

    monkeypatch.setattr(library, "cache_folder", moved)
    assert library.load().mm_answer() == 42 and str(native / "moved") in library.describe()


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "flipped", "no digest", "empty"])
def test_a_damaged_library_is_compiled_again(native, damage):
    assert library.load().mm_answer() == 42
    (path,) = (native / "cache" / "native").glob("*.so")
    whole = path.read_bytes()
    path.unlink()  # The loaded library stays mapped.
    if damage == "no digest":
        path.with_suffix(".sha256").unlink()
        path.write_bytes(whole)
    elif damage == "flipped":
        path.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    library.forget()
    assert library.load().mm_answer() == 42
    assert len(path.read_bytes()) == len(whole)


@needs_compiler
def test_a_damaged_library_without_a_compiler(native, monkeypatch, caplog):
    library.load()
    (path,) = (native / "cache" / "native").glob("*.so")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:100])
    library.forget()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in problem(caplog)


@needs_compiler
def test_a_failed_build_leaves_no_library(tmp_path):
    def fail(compiler, out):
        out.write_bytes(b"half")
        raise NativeKernelsError("the disk is full")

    folder = CacheFolder(tmp_path, open_strict(tmp_path))
    with pytest.raises(NativeKernelsError):
        ensure_compiled(folder, "kernels.so", fail)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".failed", ".lock"]


@needs_compiler
def test_two_processes_at_once_compile_once(native):
    counter = native / "count"
    compiler = script(native, f'echo x >> {counter}; sleep 0.2; exec c++ "$@"')
    program = (
        "import sys; from pathlib import Path; from mmengine.native import compile as c, library;"
        "c.SOURCES = Path(sys.argv[1]); print(library.load().mm_answer())"
    )
    environment = dict(os.environ, CXX=compiler, MMENGINE_CACHE=str(native / "cache"))
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(native / "src")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    assert [run.communicate(timeout=120)[0].strip() for run in runs] == ["42", "42"]
    assert len(counter.read_text().split()) == 3, "one run for each of two sources, and one to link"


def test_openmp_threads_are_set_in_one_place():
    """Only threads.h calls OpenMP, because all sources must also compile without OpenMP."""
    files = native_compile.source_files() + native_compile.header_files()
    asking = [path.name for path in files if re.search(r"\bomp_|<omp\.h>", path.read_text())]
    assert asking == ["threads.h"]


@pytest.mark.soak
@needs_compiler
def test_kernels_load_without_openmp(tmp_path):
    """A library that is compiled without OpenMP needs no OpenMP runtime."""
    out = tmp_path / "kernels.so"
    native_compile.compile_library(native_compile.find_compiler(), cpu.usable_isas()[0], None, out)
    script = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"
    done = subprocess.run([sys.executable, "-c", script, str(out)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
