"""Pods by their names; what libtpu opens is tested where it is installed."""

import importlib.util

import numpy as np
import pytest
from support.accelerators import needs_libtpu

from distflow_jax.parallel.mesh import MeshSizes
from distflow_jax.pods.topology import open_topology


def test_nodes_of_gpus():
    pod = open_topology("gpu:64x8")
    assert (pod.size, pod.hosts, pod.per_host, pod.chip.name) == (512, 64, 8, "h100")
    assert pod.machine.platform == "gpu" and pod.machine.memory > 70 * 2**30
    assert open_topology("h200:4x8").chip.memory > 1.5 * pod.chip.memory
    assert open_topology("h100-512").machine == pod.machine


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v7:4x4", "--topology=v7:4x4: use a machine name, .* chips are v4, v5e, v5p"),
        ("v7-8", "--topology=v7-8: .* one of v4, v5e, v5p"),
        ("v5e-12", "--topology=v5e-12: .* use v5e-1 or v5e-4 or v5e-8 or v5e-16"),
        ("l4:2x8", "--topology=l4:2x8: .* plan for one node: l4:1x8"),
        ("v5p:4x4", r"give 3 sizes for a slice of v5p, up to 16x16x24: v5p:4x4x4"),
        ("v5e:4xx4", r"give 2 sizes for a slice of v5e"),
        ("v5e:32x16", r"a slice of v5e has at most 16x16 chips"),
        ("gpu:64x9", r"write nodes x GPUs, with 1 to 8 GPUs per node: h100:64x8 has 512"),
        ("gpu:64", r"write nodes x GPUs"),
        ("", "--topology=: use a machine name"),
    ],
)
def test_names_that_are_none(name, says):
    with pytest.raises(ValueError, match=says):
        open_topology(name)


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install -r requirements-tpu-plan.txt"):
        open_topology("v5e:4x4")


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "hosts", "per_host"),
    [
        ("v5e:16x16", 64, 4),
        ("v5p:8x8x16", 256, 4),
        ("v5litepod-1", 1, 1),
        ("v5litepod-8", 1, 8),
        ("v6e-8", 1, 8),
        ("v4-8", 1, 4),
        ("v5p-16", 2, 4),
    ],
)
def test_slices_of_tpus(name, hosts, per_host):
    pod = open_topology(name)
    assert (pod.hosts, pod.per_host, len(pod.devices)) == (hosts, per_host, hosts * per_host)
    assert {device.platform for device in pod.devices} == {"tpu"}
    assert len({tuple(place) for place in pod.interconnect.places}) == pod.size
    assert pod.machine.devices == pod.size


@needs_libtpu
def test_a_chip_of_two_devices():
    pod = open_topology("tpu7x-16")
    assert (pod.size, pod.hosts, pod.per_host) == (16, 2, 8)
    assert len({tuple(place) for place in pod.interconnect.places}) == 8
    pod.check_mesh("mesh", MeshSizes(fsdp=4, tensor=4))
    assert pod.slice_of(np.arange(8)).size == 8


@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:3x5", "v5p:3x4x4"])
def test_slices_that_libtpu_does_not_know(name):
    with pytest.raises(ValueError, match="libtpu has no such slice .*use powers of 2"):
        open_topology(name)


@needs_libtpu
def test_axes_are_boxes_of_the_torus():
    pod = open_topology("v5p:4x4x12")
    pod.check_mesh("mesh", MeshSizes(fsdp=48, tensor=4))
    # a row of hosts is 8 chips: 3 hosts are not a box
    with pytest.raises(ValueError, match=r"mesh.tensor=12 is not a box .* use one of \[1, 2, 4, 8"):
        pod.check_mesh("mesh", MeshSizes(fsdp=16, tensor=12))
