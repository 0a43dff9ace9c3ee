"""Cores that a process may use, and the warning of more threads than these."""

import os

import pytest
import torch

from specdec import SpeculativeGenerator
from specdec.models import cpu_threads
from tests.support import tiny


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(groups, **files)`: 64 cores, with this /proc/self/cgroup and these files under /sys/fs/cgroup."""

    def make(groups, files):
        (tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(cpu_threads, "GROUPS_OF_PROCESS", tmp_path / "groups")
    monkeypatch.setattr(cpu_threads, "GROUPS", tmp_path / "fs")
    return make


QUOTAS = {
    "no control groups": (None, {}, 64),
    "no quota": ("0::/\n", {"cpu.max": "max 100000"}, 64),
    "two cores": ("0::/\n", {"cpu.max": "200000 100000"}, 2),
    "a core and a half": ("0::/\n", {"cpu.max": "150000 100000"}, 2),
    "a fifth of a core": ("0::/\n", {"cpu.max": "20000 100000"}, 1),
    "of a group above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
    "the smaller one": ("0::/a/b\n", {"a/b/cpu.max": "500000 100000", "a/cpu.max": "800000 100000"}, 5),
    "more than there is": ("0::/\n", {"cpu.max": "9900000 100000"}, 64),
    "another format": ("0::/\n", {"cpu.max": "two"}, 64),
    "version 1": (
        "5:memory:/a\n4:cpu,cpuacct:/docker/7\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"},
        4,
    ),
    "version 1, no quota": ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_usable_cores(machine, name):
    groups, files, cores = QUOTAS[name]
    if groups is not None:
        machine(groups, files)
    assert cpu_threads.usable_cores() == cores


def test_the_affinity_is_smaller(machine, monkeypatch):
    machine("0::/\n", {"cpu.max": "400000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})
    assert cpu_threads.usable_cores() == 3


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(cpu_threads, "_warned", set())
    return lambda cores: monkeypatch.setattr(cpu_threads, "usable_cores", lambda: cores)


def test_a_generator_warns_once_of_more_threads_than_cores(four_threads):
    four_threads(2)
    target = tiny.on_host("llama")
    with tiny.specdec_warnings() as messages:
        for _ in range(2):
            SpeculativeGenerator(target, "ngram")
    assert len(messages) == 1
    assert "torch computes with 4 threads, but this process may use 2 of the CPU's cores" in messages[0]
    assert "Set OMP_NUM_THREADS=2 before the start, or call torch.set_num_threads(2)" in messages[0]


def test_the_warning_points_at_the_callers_line(four_threads):
    four_threads(2)
    target = tiny.on_host("llama")
    with pytest.warns(UserWarning, match="4 threads") as caught:
        SpeculativeGenerator(target, "ngram")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("cores", "device"), [(4, "cpu"), (64, "cpu"), (2, "cuda"), (2, "meta")])
def test_no_warning(four_threads, cores, device):
    four_threads(cores)
    with tiny.specdec_warnings() as messages:
        cpu_threads.warn_of_excess_threads(torch.device(device))
    assert messages == []
