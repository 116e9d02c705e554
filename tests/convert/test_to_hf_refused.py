"""Exports that must not happen, or must not be half done."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert import ConversionError, convert, to_hf
from checkpoints_convert.cli import main
from jaxspec.checkpoint import open_checkpoint, read_group
from tests.convert import makers
from tests.convert.hf_folders import read_json, read_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkpoint(tmp_path):
    source = makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())
    convert(source, tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture
def refused(tmp_path, capsys):
    """``refused(src, dst, *options)``: exports by command line, expects status 2; gives the findings."""

    def run(src, dst, *options) -> list[str]:
        capsys.readouterr()
        status = main(["to-hf", str(src), str(dst), *options])
        printed = capsys.readouterr()
        assert status == 2, printed
        assert printed.out == ""
        assert not list(tmp_path.glob(".*")), "a hidden sibling was left"
        return [line.removeprefix("error: ") for line in printed.err.splitlines() if line.startswith("error: ")]

    return run


def drive(scenario: str, src: Path, dst: Path) -> dict:
    command = [sys.executable, "-m", "tests.convert.export_driver", scenario, str(src), str(dst)]
    # Freed arrays go back to the system at once, as larger ones do by themselves: what is measured is what is held.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


def flip_a_bit(checkpoint: Path, leaf: str) -> None:
    pieces = [path for path in (checkpoint / "params" / leaf).rglob("*") if path.is_file() and path.name != "zarr.json"]
    raw = bytearray(pieces[0].read_bytes())
    raw[40] ^= 1
    pieces[0].write_bytes(raw)


def test_an_existing_destination_needs_force(checkpoint, tmp_path, refused) -> None:
    out = tmp_path / "out"
    to_hf(checkpoint, out, shard_size="4KB")
    before = read_weights(out)
    assert refused(checkpoint, out) == [f"{out}: exists already; give --force to replace it"]
    assert read_weights(out) == before
    assert main(["to-hf", str(checkpoint), str(out), "--force", "--dtype", "bfloat16"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert read_json(out / "config.json")["torch_dtype"] == "bfloat16"


def test_force_replaces_what_a_converter_wrote_and_nothing_else(checkpoint, tmp_path, refused) -> None:
    precious, mixed, notes = tmp_path / "precious", tmp_path / "mixed", tmp_path / "notes"
    precious.mkdir()
    (precious / "thesis.txt").write_text("only copy")
    to_hf(checkpoint, mixed)
    (mixed / "thesis.txt").write_text("only copy")
    to_hf(checkpoint, notes)
    (notes / "tokenizer.json").mkdir()
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    to_hf(checkpoint, tmp_path / "whole")
    (tmp_path / "link").symlink_to(tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "other")
    for taken, reason in (
        (precious, "no config.json with model.safetensors"),
        (mixed, "it also holds thesis.txt"),
        (notes, "it also holds tokenizer.json"),
        (half, "no config.json with model.safetensors"),
        (tmp_path / "file", "a file"),
        (tmp_path / "link", "a link"),
        (tmp_path / "other", "no config.json with model.safetensors"),
    ):
        (line,) = refused(checkpoint, taken, "--force")
        assert line.startswith(f"{taken}: exists and is not")
        assert f"({reason}" in line
        assert line.endswith("not replaced, even with --force")
    assert (precious / "thesis.txt").read_text() == (mixed / "thesis.txt").read_text() == "only copy"
    open_checkpoint(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    assert main(["to-hf", str(checkpoint), str(tmp_path / "empty"), "--force"]) == 0


def test_source_and_destination_must_lie_apart(checkpoint, tmp_path, refused) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    for src, dst in (
        (checkpoint, checkpoint),
        (checkpoint, tmp_path / "link"),
        (tmp_path / "link", checkpoint),
        (checkpoint, checkpoint / "params" / "out"),
        (checkpoint, tmp_path),
        (checkpoint, tmp_path / "in" / ".." / "in"),
    ):
        lines = refused(src, dst, "--force")
        assert any("the same" in line or "one lies inside the other" in line for line in lines), (src, dst, lines)
    assert not (checkpoint / "params" / "out").exists()
    open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "size", ["", "0", "-5GB", "5XB", "GB", "five", "0.1", "1e9", "5 G B", "9" * 40, "nan", "5GB\n5"]
)
def test_a_shard_size_that_is_none(size, checkpoint, tmp_path, refused) -> None:
    (line,) = refused(checkpoint, tmp_path / "out", f"--shard-size={size}")
    assert line.startswith("shard size: expected bytes, or a number with KB, MB, GB, KiB, MiB or GiB, got ")
    assert repr(size) in line
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint(tmp_path, refused) -> None:
    source = makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())
    for path, named in ((source, "found no manifest.json"), (tmp_path / "nowhere", "found nothing")):
        (line,) = refused(path, tmp_path / "out")
        assert named in line


def test_every_corrupted_tensor_is_named_and_nothing_is_written(checkpoint, tmp_path, refused) -> None:
    """A copy would carry the damage on, with a clean look."""
    for leaf in ("layers.0/qkv", "layers.2/down", "layers.2/mlp_norm"):
        flip_a_bit(checkpoint, leaf)
    assert sorted(refused(checkpoint, tmp_path / "out", "--shard-size", "4KB")) == [
        "layers.0.qkv: its sha256 is not the manifest's",
        "layers.2.down: its sha256 is not the manifest's",
        "layers.2.mlp_norm: its sha256 is not the manifest's",
    ]
    assert not (tmp_path / "out").exists()


def test_a_corrupted_scale_is_named(tmp_path, refused) -> None:
    source = makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())
    convert(source, tmp_path / "in", quantize="int8")
    flip_a_bit(tmp_path / "in", "layers.1/o_scale")
    assert refused(tmp_path / "in", tmp_path / "out") == ["layers.1.o_scale: its sha256 is not the manifest's"]


def test_a_tensor_that_is_missing_on_disk_is_named(checkpoint, tmp_path, refused) -> None:
    shutil.rmtree(checkpoint / "params" / "layers.1" / "o")
    (line,) = refused(checkpoint, tmp_path / "out")
    assert "layers.1.o is missing from params/layers.1" in line
    assert not (tmp_path / "out").exists()


def test_a_failure_keeps_the_earlier_export(checkpoint, tmp_path, refused) -> None:
    to_hf(checkpoint, tmp_path / "out")
    before = read_weights(tmp_path / "out")
    flip_a_bit(checkpoint, "layers.0/qkv")
    assert len(refused(checkpoint, tmp_path / "out", "--force")) == 1
    assert read_weights(tmp_path / "out") == before


def test_float16_that_would_overflow_is_refused(tmp_path, refused) -> None:
    weights = makers.hf_tensors()
    weights["model.norm.weight"][3] = 65520  # rounds to infinity; 65519 rounds to 65504
    weights["model.layers.1.mlp.up_proj.weight"][2, 5:7] = -1e30
    weights["model.layers.0.mlp.up_proj.weight"][2, 5] = 65519
    weights["lm_head.weight"][0, 0] = np.inf  # stays what it is
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), tmp_path / "in")
    lines = refused(tmp_path / "in", tmp_path / "out", "--dtype", "float16")
    assert [line.partition(" values")[0] for line in lines] == [
        "model.layers.1.mlp.up_proj.weight: 2 of 437",
        "model.norm.weight: 1 of 19",
    ]
    assert not (tmp_path / "out").exists()
    assert main(["to-hf", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0


@pytest.mark.parametrize("divisors", [[1.0, 2.0, 3.0, 4.0], [1.0, 8.0, 8.0, 8.001], [8.0, 8.0, 8.0, 1.0]])
def test_rope_divisors_without_a_name_are_refused(divisors, tmp_path, refused) -> None:
    """Left out, they would change every logit; see E09."""
    sizes = makers.SIZES._replace(H=8)
    tensors = makers.gguf_tensors(makers.hf_tensors(sizes), sizes) | {"rope_freqs.weight": np.float32(divisors)}
    convert(makers.write_gguf(tmp_path / "model.gguf", makers.gguf_fields(sizes), tensors), tmp_path / "in")
    (line,) = refused(tmp_path / "in", tmp_path / "out")
    assert "config.json has no name for these 4 divisors of the frequencies" in line
    assert not (tmp_path / "out").exists()


def test_a_model_larger_than_the_disk_is_refused_before_anything_is_written(checkpoint, tmp_path, refused) -> None:
    """A manifest and a config that promise 4 EB; nothing of it is read."""
    manifest, config = read_json(checkpoint / "manifest.json"), read_json(checkpoint / "config.json")
    config["vocab_size"] = 1 << 55
    for name in ("embed", "lm_head"):
        manifest["tensors"][name]["shape"][0] = 1 << 55
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint / "config.json").write_text(json.dumps(config))
    (line,) = refused(checkpoint, tmp_path / "out")
    need = 2 * (1 << 55) * 19 * 4
    found = line.removeprefix(f"{tmp_path / 'out'}: needs ").partition(" bytes, ")
    assert need < int(found[0].replace(",", "")) < need + (64 << 20)
    assert found[2].endswith(" are free on its disk")


def test_everything_wrong_is_told_at_once(checkpoint, tmp_path, refused) -> None:
    (tmp_path / "out").mkdir()
    lines = refused(tmp_path / "nowhere", tmp_path / "out", "--shard-size", "x")
    assert len(lines) == 3
    with pytest.raises(ConversionError) as caught:
        to_hf(tmp_path / "nowhere", tmp_path / "out", shard_size="x")
    assert list(caught.value.findings) == lines


def test_a_dtype_that_is_none_is_refused_in_the_library_too(checkpoint, tmp_path) -> None:
    with pytest.raises(ConversionError, match="dtype: expected keep, float32, bfloat16, float16, got 'int8'"):
        to_hf(checkpoint, tmp_path / "out", dtype="int8")


def test_killed_at_any_moment_it_leaves_nothing_that_loads(tmp_path) -> None:
    """E27: SIGKILL, ten times, spread over the whole of the writing; then a rerun works and clears up."""
    sizes = makers.SIZES._replace(L=31)
    convert(makers.write_hf(tmp_path / "hf", makers.hf_config(sizes), makers.hf_tensors(sizes)), tmp_path / "in")
    seen = drive("kill", tmp_path / "in", tmp_path / "out")
    assert seen["first"] == 0
    for killed in seen["killed"]:
        assert killed["exists"] == killed["loads"], "a folder at DST that does not load"
    assert any(killed["left"] and not killed["exists"] for killed in seen["killed"]), "no kill hit the writing"
    assert (seen["rerun"], seen["left"], seen["ok"]) == (0, [], True)


def test_a_full_disk_leaves_nothing_and_a_rerun_works(checkpoint, tmp_path) -> None:
    """E27"""
    seen = drive("full", checkpoint, tmp_path / "out")
    assert (seen["status"], seen["exists"], seen["left"]) == (1, False, [])
    assert len([line for line in seen["stderr"].splitlines() if line.startswith("error: ")]) == 1
    assert (seen["rerun"], seen["ok"]) == (0, True)


def test_memory_stays_near_the_largest_group(tmp_path) -> None:
    """The model is 157 MB, every large group about 16. Allowed: two and a half of them; Orbax itself holds two."""
    sizes = makers.Sizes(V=16001, D=256, F=4801, N=8, K=2, H=32, L=9)
    small = makers.SIZES
    with tempfile.TemporaryDirectory(dir=tmp_path) as scratch:  # not left for the next days, as tmp_path is
        src, made = Path(scratch) / "src", Path(scratch) / "in"
        makers.write_hf(src / "small", makers.hf_config(small), makers.hf_tensors(small))
        config = makers.hf_config(sizes, tie_word_embeddings=True)
        makers.write_hf(src / "large", config, makers.hf_tensors(sizes, tied=True))
        for name in ("small", "large"):
            convert(src / name, made / name)
            shutil.rmtree(src / name)
        checkpoint = open_checkpoint(made / "large")
        total = sum(record.nbytes for record in checkpoint.manifest.tensors.values())
        largest = max(
            sum(array.nbytes for array in read_group(checkpoint, group).values()) for group in checkpoint.groups()
        )
        seen = drive("memory", made, Path(scratch) / "out")
    grown = seen["after"] - seen["before"]
    assert total > 150e6
    assert largest < 17e6
    assert grown < 2.5 * largest, f"{grown / 1e6:.0f} MB"
