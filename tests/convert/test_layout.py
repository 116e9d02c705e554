"""Files laid out for a mesh, and checkpoints that move from one mesh to another."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import ConversionError, convert
from checkpoints_convert.cli import main
from jaxspec.checkpoint import open_checkpoint, restore_params
from jaxspec.checkpoint.manifest import group_and_leaf
from jaxspec.sharding import make_sharding, parse_mesh

MESHES = ("1", "model=4", "data=2,model=2", "data=4")


@pytest.fixture
def hf(shared):
    return shared / "fixtures" / "tiny-llama3" / "hf"


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_each_device_of_the_mesh_finds_its_pieces_in_files_of_their_own(mesh, hf, tmp_path) -> None:
    assert convert(hf, tmp_path / "out", mesh=mesh).manifest.layout == parse_mesh(mesh, 4)
    checkpoint, sharding = open_checkpoint(tmp_path / "out"), make_sharding(mesh)
    split = 0
    for name, spec in checkpoint.specs.items():
        group, leaf = group_and_leaf(name)
        header = json.loads((tmp_path / "out" / "params" / group / leaf / "zarr.json").read_text())
        chunk = header["chunk_grid"]["configuration"]["chunk_shape"]
        piece = sharding.named(spec.axes, spec.shape).shard_shape(spec.shape)
        assert all(size % part == 0 for size, part in zip(piece, chunk, strict=True)), (name, piece, chunk)
        split += piece != spec.shape
    assert (split > 0) == (parse_mesh(mesh, 4)["model"] > 1)


@pytest.mark.parametrize("stored_for", [None, *MESHES])
def test_any_layout_restores_bitwise_on_any_mesh(stored_for, hf, tmp_path, tiny_models, tree) -> None:
    convert(hf, tmp_path / "out", mesh=stored_for)
    expected = tree(tiny_models("tiny-llama3"))
    assert {name: array.tobytes() for name, array in tree(tmp_path / "out").items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
    checkpoint = open_checkpoint(tmp_path / "out")
    for mesh in MESHES:
        sharding = make_sharding(mesh)
        shardings = {name: sharding.named(spec.axes, spec.shape) for name, spec in checkpoint.specs.items()}
        for name, array in restore_params(checkpoint, shardings, jnp.float32).items():
            assert array.sharding.is_equivalent_to(shardings[name], array.ndim)
            assert np.asarray(array).tobytes() == expected[name].tobytes(), (mesh, name)


def test_the_command_makes_the_devices_that_the_mesh_takes(hf, tmp_path) -> None:
    command = [sys.executable, "-m", "checkpoints_convert", "to-orbax", hf, tmp_path / "out", "--mesh", "model=2"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "out").manifest.layout == {"data": 1, "model": 2}
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_mesh_that_cannot_be_is_refused(hf, tmp_path, refused) -> None:
    for mesh in ("auto", "0", "tensor=2", "data=,model=2", "99999"):
        (line,) = refused(hf, "--mesh", mesh)
        assert "mesh" in line
    with pytest.raises(ConversionError, match="needs 8 devices, 4 visible"):
        convert(hf, tmp_path / "out", mesh="8")
