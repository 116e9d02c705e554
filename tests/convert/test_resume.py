"""A conversion that was stopped goes on where it stopped, and never from what it was not."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints_convert import ConversionError, convert
from checkpoints_convert.cli import main
from checkpoints_convert.convert import Options, checked
from checkpoints_convert.progress import Advance
from jaxspec.checkpoint import CheckpointWriter
from tests.convert import makers


@pytest.fixture
def source(tmp_path):
    sizes = makers.SIZES._replace(L=7)
    return makers.write_hf(tmp_path / "hf", makers.hf_config(sizes), makers.hf_tensors(sizes))


class Stopping:
    """A reporter that presses Ctrl-C once ``groups`` groups are written."""

    def __init__(self, groups: int) -> None:
        self.left = groups

    @contextlib.contextmanager
    def stage(self, name: str, total_bytes: int) -> Iterator[Advance]:
        def advance(done: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

        yield advance if name == "converting" else lambda done: None


def stage_of(dst: Path) -> Path:
    (stage,) = dst.parent.glob(f".{dst.name}.partial-*")
    return stage


def interrupt(source: Path, dst: Path, groups: int, **options) -> Path:
    with pytest.raises(KeyboardInterrupt):
        convert(source, dst, progress=Stopping(groups), **options)
    assert not dst.exists()
    return stage_of(dst)


def inodes(params: Path) -> dict[str, int]:
    return {str(path.relative_to(params)): path.stat().st_ino for path in params.rglob("*") if path.is_file()}


def test_finished_groups_are_kept_and_not_written_again(source, tmp_path, tree) -> None:
    convert(source, tmp_path / "whole")
    stage = interrupt(source, tmp_path / "out", 4)
    kept = inodes(stage / "params")
    groups = {name.partition("/")[0] for name in kept}
    assert len(groups) == 4
    result = convert(source, tmp_path / "out")
    assert set(result.resumed) == groups
    now = inodes(tmp_path / "out" / "params")
    assert {name: now[name] for name in kept} == kept
    assert {name: array.tobytes() for name, array in tree(tmp_path / "out").items()} == {
        name: array.tobytes() for name, array in tree(tmp_path / "whole").items()
    }
    for name in ("manifest.json", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "manifest.json", "params"]
    assert not list(tmp_path.glob(".*"))


def test_errors_of_quantised_groups_are_kept_too(source, tmp_path) -> None:
    whole = convert(source, tmp_path / "whole", quantize="int8").manifest
    interrupt(source, tmp_path / "out", 4, quantize="int8")
    result = convert(source, tmp_path / "out", quantize="int8")
    assert len(result.resumed) == 4
    assert result.manifest == whole


def test_the_command_says_that_it_goes_on(source, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("checkpoints_convert.commands.to_orbax.reporter", lambda: Stopping(3))
    command = ["to-orbax", str(source), str(tmp_path / "out")]
    assert main(command) == 130
    assert capsys.readouterr().err == "error: interrupted; the same command again goes on from here\n"
    monkeypatch.setattr("checkpoints_convert.commands.to_orbax.reporter", lambda: Stopping(-1))
    assert main(command) == 0
    assert "went on from an earlier run, which had finished 3 groups" in capsys.readouterr().out


def test_what_is_there_already_needs_no_disk_again(source, tmp_path, monkeypatch) -> None:
    """A disk that holds the checkpoint once must do, however often it is begun."""
    with checked(source, tmp_path / "out", Options()) as conversion:
        needed = conversion.disk_needed
    stage = interrupt(source, tmp_path / "out", 4)
    there = sum(path.lstat().st_blocks * 512 for path in stage.rglob("*"))
    assert there > 0
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - there - 1))
    with pytest.raises(ConversionError, match="are free on its disk"):
        convert(source, tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - there))
    assert len(convert(source, tmp_path / "out").resumed) == 4


def touch(source: Path) -> None:
    os.utime(source / "model.safetensors", ns=(1, 1))


def other_rope(source: Path) -> None:
    sizes = makers.SIZES._replace(L=7)
    (source / "config.json").write_text(json.dumps(makers.hf_config(sizes, rope_theta=10000.0)))


@pytest.mark.parametrize("change", [touch, other_rope])
def test_a_source_that_changed_is_begun_anew(change, source, tmp_path) -> None:
    stage = interrupt(source, tmp_path / "out", 4)
    change(source)
    assert convert(source, tmp_path / "out").resumed == ()
    assert not stage.exists()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8"}, {"mesh": "4"}])
def test_other_options_begin_anew(options, source, tmp_path) -> None:
    interrupt(source, tmp_path / "out", 4)
    assert convert(source, tmp_path / "out", **options).resumed == ()
    assert not list(tmp_path.glob(".*"))


def test_the_same_files_elsewhere_are_another_source(source, tmp_path) -> None:
    """Two fine-tunes have the same sizes, and a copy may keep the time."""
    interrupt(source, tmp_path / "out", 4)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    assert convert(copy, tmp_path / "out").resumed == ()


def halve_a_piece(stage: Path) -> None:
    (piece,) = [path for path in (stage / "params" / "layers.0" / "down" / "c").rglob("*") if path.is_file()]
    piece.write_bytes(piece.read_bytes()[:100])


def half_a_line(stage: Path) -> None:
    journal = stage / "finished-groups.jsonl"
    *lines, last = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines) + last[:50])


def a_begun_group(stage: Path) -> None:
    (stage / "params" / "layers.6.orbax-checkpoint-tmp").mkdir()
    (stage / "params" / "layers.5").mkdir()
    (stage / "params" / "layers.5" / "half").write_text("")


@pytest.mark.parametrize(("spoil", "kept"), [(halve_a_piece, 3), (half_a_line, 3), (a_begun_group, 4)])
def test_what_was_not_whole_is_written_again(spoil, kept, source, tmp_path) -> None:
    spoil(interrupt(source, tmp_path / "out", 4))
    result = convert(source, tmp_path / "out")
    assert len(result.resumed) == kept
    assert main(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0
    stored = sorted(path.name for path in (tmp_path / "out" / "params").iterdir())
    assert stored == sorted(["embed", "final_norm", "lm_head", *(f"layers.{i}" for i in range(7))])


def test_a_running_conversion_is_not_taken_over(source, tmp_path) -> None:
    stage = interrupt(source, tmp_path / "out", 4)
    with CheckpointWriter(tmp_path / "out", force=False, resume_key=(stage / "resume-key").read_text()) as first:
        assert len(first.finished) == 4
        assert convert(source, tmp_path / "out").resumed == ()
    assert not list(tmp_path.glob(".*"))


def test_errors_other_than_an_interrupt_leave_nothing(source, tmp_path) -> None:
    class Failing(Stopping):
        @contextlib.contextmanager
        def stage(self, name: str, total_bytes: int) -> Iterator[Advance]:
            yield lambda done: 1 // 0

    with pytest.raises(ZeroDivisionError):
        convert(source, tmp_path / "out", progress=Failing(1))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
