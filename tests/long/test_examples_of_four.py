"""The examples of meshes on four members, two a worker; `make test` runs them on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_examples import EXAMPLES, run

MESHES = [example for example in EXAMPLES if example.stem in ("09_mesh", "10_tensor_parallel", "11_fsdp")]


@pytest.mark.parametrize("example", MESHES, ids=[example.stem for example in MESHES])
def test_four_members_are_equal_to_serial(example: Path, tmp_path: Path) -> None:
    printed = run(str(example), "4", folder=tmp_path)  # fails where the example's own comparison does
    assert "4 members on nodes 0, 1" in printed and "largest difference:" in printed
