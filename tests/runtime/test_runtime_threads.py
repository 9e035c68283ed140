"""Tests the available memory, and the number of threads for a machine, model, environment and setting."""

import os
import threading

import pytest
import torch

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.runtime.device.cpu import available_memory
from mmengine.runtime.device.threads import SMALL_HIDDEN_SIZE, choose_threads, usable_cores
from mmengine.serve.engine.engine import Engine


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that simulates a machine with `num_cpus` CPUs, `siblings` per core, and returns the
    machine's root folder.
    """

    def make(num_cpus, files=(), siblings=2):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cpus)), raising=False)
        for cpu in range(num_cpus):
            first = cpu - cpu % siblings
            write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{first}-{first + 1}\n")
        for path, text in dict(files).items():
            write(path, text)
        return tmp_path

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return make


def test_siblings_are_one_core(machine):
    assert usable_cores(machine(16)).count == 8


def test_a_machine_without_core_information(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert usable_cores(tmp_path).count == 3


@pytest.mark.parametrize(
    "files,count",
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "350000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/../gone\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "900000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, 8),
        ({"proc/self/cgroup": "torn"}, 8),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n1:memory:/y\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_quotas_of_a_cgroup(machine, files, count):
    assert usable_cores(machine(16, files)).count == count


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:  4000000 kB\n"}
V2 = "sys/fs/cgroup/a/memory"
V1 = "sys/fs/cgroup/memory/y/memory"


@pytest.mark.parametrize(
    ("files", "kilobytes"),
    [
        ({}, 2 * 2**20),
        (MEMINFO, 4_000_000),
        (MEMINFO | {"proc/self/cgroup": "0::/a/b\n", f"{V2}.max": "max\n"}, 4_000_000),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}.max": "3072000000\n",
                f"{V2}.current": "2048000000\n",
                f"{V2}.stat": "anon 7\ninactive_file 1024000000\n",  # reclaimable
            },
            2_000_000,
        ),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "4:cpu:/x\n1:memory:/y\n",
                f"{V1}.limit_in_bytes": "3072000",
                f"{V1}.usage_in_bytes": "4096000",
                f"{V1}.stat": "inactive_file 1\ntotal_inactive_file 1024\n",
            },
            0,
        ),
    ],
)
def test_memory_that_is_free_for_a_process(machine, files, kilobytes):
    assert available_memory(machine(1, files)) == kilobytes * 1024


def test_precedence_of_thread_settings(machine):
    root = machine(16)
    assert choose_threads(0, 4096, {}, root).count == 8
    assert choose_threads(0, SMALL_HIDDEN_SIZE - 1, {}, root).count == 1
    assert choose_threads(0, 128, {"OMP_NUM_THREADS": "3,1"}, root).count == 3
    assert choose_threads(0, 4096, {"OMP_NUM_THREADS": "many"}, root).count == 8
    assert choose_threads(5, 128, {"OMP_NUM_THREADS": "3"}, root).count == 5


def test_an_engine_sets_the_number_and_gives_it_back(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = []
        with Engine(device="cpu", config=EngineConfig(num_blocks=8)) as engine:
            assert engine.built.num_threads == torch.get_num_threads() == 1  # the model is small
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert torch.get_num_threads() == 3
        with Engine(device="cpu", config=EngineConfig(num_blocks=8, num_threads=2)):
            assert torch.get_num_threads() == 2
            torch.set_num_threads(4)  # the host program's later choice is kept
        assert torch.get_num_threads() == 4
        assert seen == [1]
    finally:
        torch.set_num_threads(before)


def test_a_number_out_of_range():
    with pytest.raises(ConfigError, match="num_threads must lie in 0 to 1024"):
        EngineConfig(num_threads=-1).check()
