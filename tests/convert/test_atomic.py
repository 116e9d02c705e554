"""A checkpoint appears whole or not at all, and a conversion needs little more memory than its largest tensor."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.cli import main
from jaxspec.checkpoint import CheckpointWriter, open_checkpoint
from jaxspec.model.params import param_specs
from jaxspec.staging import StagedFolder
from tests.convert import makers

ROOT = Path(__file__).resolve().parents[2]


def drive(scenario: str, src: Path, dst: Path) -> dict:
    command = [sys.executable, "-m", "tests.convert.crash_driver", scenario, str(src), str(dst)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


@pytest.fixture
def source(tmp_path):
    sizes = makers.SIZES._replace(L=19)
    return makers.write_hf(tmp_path / "hf", makers.hf_config(sizes), makers.hf_tensors(sizes))


def test_killed_at_any_moment_it_leaves_nothing_that_loads_and_the_next_run_goes_on(source, tmp_path) -> None:
    """E27: SIGKILL, ten times, spread over the whole of the writing; each time a rerun ends in the same bytes."""
    seen = drive("kill", source, tmp_path / "out")
    assert seen["first"] == 0
    for killed in seen["killed"]:
        assert killed["exists"] == killed["loads"], "a folder at DST that does not load"
        assert (killed.get("rerun", 0), killed["same"], killed["left_at_last"]) == (0, True, [])
    resumed = [killed["resumed"] for killed in seen["killed"] if "resumed" in killed]
    assert any(killed["left"] and not killed["exists"] for killed in seen["killed"]), "no kill hit the writing"
    assert max(resumed) > 5, resumed
    # A later kill leaves more. Not one by one: the child that is killed and the one that was timed differ in speed.
    assert sum(resumed[len(resumed) // 2 :]) > sum(resumed[: len(resumed) // 2]), resumed


def test_a_full_disk_leaves_nothing_and_a_rerun_works(source, tmp_path) -> None:
    """E27: full at the first weight, and full after the last one, at the manifest."""
    seen = drive("full", source, tmp_path / "out")
    assert seen["starved"] == [{"status": 1, "exists": False, "left": []}] * 2
    errors = [line for line in seen["stderr"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, seen["stderr"]
    assert (seen["rerun"], seen["ok"]) == (0, True)


@pytest.mark.parametrize(("place", "expected"), [("/proc/out", 2), ("/proc/self/out/deep", 2), ("file/out", 1)])
def test_a_place_that_cannot_be_written_is_told_in_one_line(place, expected, source, tmp_path, capsys) -> None:
    """E27: /proc has no bytes free, which is seen before anything is tried."""
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    status = main(["to-orbax", str(source), str(tmp_path / place)])
    err = capsys.readouterr().err.splitlines()
    assert status == expected
    assert len([line for line in err if line.startswith("error: ")]) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_folder_is_a_fault(source, tmp_path, capsys) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert main(["to-orbax", str(source), str(locked / "out")]) == 1
    assert "error: PermissionError" in capsys.readouterr().err
    assert not list(locked.iterdir())


def fail_midway(dst: Path, *, force: bool) -> None:
    with CheckpointWriter(dst, force=force) as writer:
        writer.write_group("embed", {"embed": np.ones((5, 3), np.float32)})
        raise ZeroDivisionError


def test_parents_are_made_and_taken_back(source, tmp_path) -> None:
    convert(source, tmp_path / "a" / "b" / "out")
    open_checkpoint(tmp_path / "a" / "b" / "out")
    with pytest.raises(ZeroDivisionError):
        fail_midway(tmp_path / "c" / "d" / "out", force=False)
    assert not (tmp_path / "c").exists()


def test_a_failure_keeps_the_earlier_checkpoint(source, tmp_path) -> None:
    convert(source, tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    with pytest.raises(ZeroDivisionError):
        fail_midway(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_a_checkpoint_that_is_not_complete_cannot_be_finished(source, tmp_path) -> None:
    manifest = convert(source, tmp_path / "out").manifest
    config = open_checkpoint(tmp_path / "out").config
    del manifest.tensors["layers.7.o"]
    with (
        pytest.raises(ValueError, match=r"the manifest lacks layers\.7\.o"),
        CheckpointWriter(tmp_path / "other", force=False) as writer,
    ):
        writer.finish(config, param_specs(config), manifest, None)
    assert not (tmp_path / "other").exists()


def test_only_abandoned_stages_are_cleared(tmp_path) -> None:
    """Two writers to one destination: the second leaves the first alone, and whoever comes last wins nothing."""
    first, second = StagedFolder(tmp_path / "[out]"), StagedFolder(tmp_path / "[out]")
    first.create()
    first.write_text("who", "first")
    second.create()
    assert (first.path / "who").is_file()
    second.discard()
    abandoned = first.path
    os.close(first._lock)  # what the death of its process does
    StagedFolder(tmp_path / "[out]").create()
    assert not abandoned.exists()


def test_a_stage_whose_writer_died_at_its_first_or_last_moment_is_cleared(tmp_path) -> None:
    """Nothing in it yet, or all of it and about to be renamed: there is no file in a stage that tells of its writer."""
    for name, files in ((".out.partial-first", ()), (".out.partial-last", ("manifest.json", "config.json"))):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("{}")
    stage = StagedFolder(tmp_path / "out")
    stage.create()
    assert list(tmp_path.iterdir()) == [stage.path]
    stage.discard()


def test_what_was_moved_aside_is_kept_until_something_took_its_place(tmp_path) -> None:
    aside = tmp_path / ".out.partial-old-1" / "out"
    aside.mkdir(parents=True)
    stage = StagedFolder(tmp_path / "out")
    stage.create()
    assert aside.exists(), "the only copy"
    stage.publish()
    second = StagedFolder(tmp_path / "out")
    second.create()
    assert not aside.exists()
    second.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_memory_stays_near_the_largest_tensor(tmp_path) -> None:
    """The model is 160 MB, its largest tensor 16. Allowed: twice that tensor, and some slack for the allocator."""
    sizes = makers.Sizes(V=16001, D=256, F=1301, N=8, K=2, H=32, L=31)
    small = makers.SIZES
    with tempfile.TemporaryDirectory(dir=tmp_path) as scratch:  # not left for the next days, as tmp_path is
        src = Path(scratch) / "src"
        makers.write_hf(src / "small", makers.hf_config(small), makers.hf_tensors(small))
        weights = makers.hf_tensors(sizes, tied=True, dtype=np.float16)
        makers.write_hf(src / "large", makers.hf_config(sizes, tie_word_embeddings=True), weights)
        total = sum(2 * array.nbytes for array in weights.values())
        largest = sizes.V * sizes.D * 4
        del weights
        seen = drive("memory", src, Path(scratch) / "out")
    grown = seen["after"] - seen["before"]
    assert total > 150e6
    assert grown < 2 * largest + 24e6, f"{grown / 1e6:.0f} MB"
