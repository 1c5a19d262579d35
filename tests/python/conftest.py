"""A mesh whose members' processes stay for the tests of this folder."""

from __future__ import annotations

from typing import Any

import pytest

import distruntime as dr

_meshes: dict[int, dr.mesh.DeviceMesh] = {}


@pytest.fixture
def mesh(session: Any) -> dr.mesh.DeviceMesh:
    """Two members on the two workers of the shared session."""
    if id(session) not in _meshes:
        _meshes.clear()
        _meshes[id(session)] = dr.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return _meshes[id(session)]


@pytest.fixture
def nurseries(mesh: dr.mesh.DeviceMesh) -> None:
    """The workers have what starts processes, so that a test does not wait for it."""
    if "spmd" not in mesh._kept:
        dr.fetch(dr.spmd(mesh, lambda: None)())
