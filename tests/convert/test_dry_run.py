"""--dry-run: the whole plan, the disk it takes, and nothing written; at Llama 3 8B's size too."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from checkpoints_convert import convert
from checkpoints_convert.cli import main
from tests.convert import makers

LLAMA3_8B = makers.Sizes(V=128256, D=4096, F=14336, N=32, K=8, H=128, L=32)


def shapes_of(sizes: makers.Sizes) -> dict[str, tuple[int, ...]]:
    """As ``makers.hf_tensors`` makes them, without making them."""
    tiny = makers.hf_tensors(makers.SIZES._replace(L=sizes.L))
    letters = dict(zip(makers.SIZES, sizes, strict=True))
    attention = {makers.SIZES.N * makers.SIZES.H: sizes.N * sizes.H, makers.SIZES.K * makers.SIZES.H: sizes.K * sizes.H}
    return {name: tuple((letters | attention)[size] for size in array.shape) for name, array in tiny.items()}


def write_sparse(folder: Path, shapes: dict[str, tuple[int, ...]], shards: int) -> None:
    """True headers and files of the true size, with holes for data."""
    folder.mkdir()
    names, weight_map, total = list(shapes), {}, 0
    for number in range(shards):
        file_name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        entries, end = {}, 0
        for name in names[number * len(names) // shards : (number + 1) * len(names) // shards]:
            begin, end = end, end + 2 * math.prod(shapes[name])
            entries[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
            weight_map[name] = file_name
        text = json.dumps(entries).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_llama_3_8b_names_every_tensor(tmp_path, capsys, monkeypatch) -> None:
    shapes = shapes_of(LLAMA3_8B)
    assert len(shapes) == 291
    write_sparse(tmp_path / "hf", shapes, 4)
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(makers.hf_config(LLAMA3_8B, torch_dtype="bfloat16", bos_token_id=128000, eos_token_id=128001))
    )
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < 20e9:
        usage = shutil.disk_usage(tmp_path)._replace(free=20 << 30)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main(["to-orbax", str(tmp_path / "hf"), str(tmp_path / "out"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for name in shapes:
        assert f"{name} (BF16)" in out, name
    assert "layers.31.qkv" in out
    assert "8x6x128x4096" in out
    assert "8,030,261,248 parameters, 195 tensors, 16,060,522,496 bytes" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    assert main(["to-orbax", str(tmp_path / "hf"), str(tmp_path / "out"), "--dry-run", "--quantize", "int8"]) == 0
    out = capsys.readouterr().out
    assert "layers.31.qkv_scale" in out
    # One byte a weight, four a channel, two a norm's element.
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    channels = sum(shape[0] for shape in shapes.values() if len(shape) == 2)
    norms = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert f"{matrices + 4 * channels + 2 * norms:,} bytes; the disk needs" in out


def test_what_it_says_is_what_is_written(tmp_path, capsys) -> None:
    source = makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())
    for options in ([], ["--dtype", "bfloat16"], ["--quantize", "int8"]):
        assert main(["to-orbax", str(source), str(tmp_path / "out"), "--dry-run", *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert not (tmp_path / "out").exists()
        assert main(["to-orbax", str(source), str(tmp_path / "out"), *options]) == 0
        capsys.readouterr()
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        for name, record in manifest["tensors"].items():
            (line,) = [line for line in lines if line.split()[0] == name]
            _, dtype, shape, *_ = line.split()
            assert (dtype, shape) == (record["dtype"], "x".join(map(str, record["shape"])))
        shutil.rmtree(tmp_path / "out")


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, refused, monkeypatch) -> None:
    source = makers.write_hf(tmp_path / "hf", makers.hf_config(), makers.hf_tensors())
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for options in ([], ["--dry-run"]):
        (line,) = refused(source, *options)
        assert "1,000,000 are free on its disk" in line


def test_findings_are_told_in_a_dry_run_too(tmp_path, refused) -> None:
    weights = makers.hf_tensors()
    del weights["model.norm.weight"]
    (line,) = refused(makers.write_hf(tmp_path / "hf", makers.hf_config(), weights), "--dry-run")
    assert "model.norm.weight is missing" in line


@pytest.mark.parametrize("shards", [1, 3])
def test_sources_are_read_once_and_forward(shards, tmp_path, monkeypatch) -> None:
    """By the system calls' own offsets: a slow or remote file is gone through once, besides its directory."""
    weights = makers.hf_tensors()
    names = sorted(weights)  # as the safetensors library orders them; the middle shard's ends cut layers in two
    parts = [
        {name: weights[name] for name in names[i * len(names) // shards :][: len(names) // shards]}
        for i in range(shards)
    ]
    source = makers.write_sharded(tmp_path / "hf", makers.hf_config(), parts)
    reads: dict[int, list[tuple[int, int]]] = {}
    true_read = os.preadv

    def recording(descriptor, buffers, offset):
        count = true_read(descriptor, buffers, offset)
        reads.setdefault(os.fstat(descriptor).st_ino, []).append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", recording)
    convert(source, tmp_path / "out")
    for file in source.glob("*.safetensors"):
        header, *data = reads[file.stat().st_ino]
        length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert header == (0, 8)
        assert data[0] == (8, length - 8)
        rest = data[1:]
        assert sum(count for _, count in rest) == file.stat().st_size, "a byte was read twice"
        assert rest == sorted(rest), "a read went back"
