"""Zip files that lie: about sizes, places, names and what is in them."""

import pickle
import struct
import zipfile

import pytest

from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.stored_zip import read_zip
from tests.convert.meta_makers import (
    entries_of,
    pickled,
    write_pth,
    write_zip,
)
from tests.convert.pth_files import FLOATS, refusal

# Zip files that lie.

GOOD = {"w": FLOATS}


def edited(path, tmp_path, change) -> str:
    data = bytearray(path.read_bytes())
    change(data)
    (tmp_path / "b.pth").write_bytes(data)
    return refusal(tmp_path / "b.pth")


def put(form: str, value: int):
    """An edit: ``value`` at an offset behind the last place of a signature."""

    def at(signature: bytes, offset: int):
        def change(data: bytearray) -> None:
            struct.pack_into(form, data, data.rindex(signature) + offset, value)

        return change

    return at


CENTRAL, LOCAL, END = b"PK\1\2", b"PK\3\4", b"PK\5\6"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("<H", 1)(CENTRAL, 8), "is encrypted"),
        (put("<H", 8)(CENTRAL, 10), "is compressed (method 8"),
        (put("<I", 1)(CENTRAL, 20), "is compressed (method 0, 1 bytes for 2)"),
        (put("<I", 1 << 30)(CENTRAL, 24), "is compressed"),
        (put("<I", 1 << 30)(CENTRAL, 42), "begins at byte 1073741824, outside the file"),
        (put("<I", 5)(CENTRAL, 42), "found none"),
        (put("<I", 0xFFFFFFFF)(CENTRAL, 42), "64-bit size is missing"),
        (put("<H", 7)(CENTRAL, 34), "another zip volume"),
        (put("<H", 60000)(CENTRAL, 28), "ends inside entry"),
        (put("<H", 8)(LOCAL, 8), "its header and the directory disagree"),
        (put("<H", 60000)(LOCAL, 28), "the directory begins at byte"),
        (put("<H", 3)(LOCAL, 26), "found none"),
        (put("<H", 1)(END, 4), "one of several zip volumes"),
        (put("<H", 2)(END, 8), "one of several zip volumes"),
        (put("<I", 1 << 30)(END, 12), "zip directory of 4 entries in 1073741824 bytes"),
        (put("<I", 1 << 30)(END, 16), "but ends at byte"),
        (put("<I", 3)(END, 16), "number 0 is none"),
        (put("<H", 9)(END, 20), "no zip directory at its end"),
    ],
)
def test_a_zip_directory_that_lies_is_refused(change, named, tmp_path) -> None:
    path = write_pth(tmp_path / "a.pth", GOOD)
    assert named in edited(path, tmp_path, change)


def test_a_size_beyond_the_entry_is_refused(tmp_path) -> None:
    """Both sizes alike, so that it is not compression: the entry would run into the directory."""
    path = write_pth(tmp_path / "a.pth", GOOD)

    def change(data: bytearray) -> None:
        struct.pack_into("<II", data, data.rindex(CENTRAL) + 20, 5000, 5000)

    assert "needs 5000 bytes" in edited(path, tmp_path, change)


def test_entries_that_overlap_are_refused(tmp_path) -> None:
    """A zip bomb without compression: many entries over the same bytes."""
    path = write_pth(tmp_path / "a.pth", GOOD)

    def change(data: bytearray) -> None:
        first = data.index(CENTRAL)
        struct.pack_into("<II", data, first + 20, 350, 350)

    assert "overlap" in edited(path, tmp_path, change)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b", "a\\b"])
def test_names_that_leave_the_archive_are_refused(name, tmp_path) -> None:
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr(name, b"x")
    assert "expected a path inside the archive" in refusal(path)
    assert sorted(tmp_path.iterdir()) == [path]


def test_two_entries_of_one_name_are_refused(tmp_path) -> None:
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", b"\x80\x02}.")
    assert "there are two of that name" in refusal(path)


def test_a_compressed_file_is_refused(tmp_path) -> None:
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", bytes(50_000_000))
    assert "archive/data.pkl is compressed" in refusal(path)


def test_the_64_bit_directory_must_be_where_it_is_said_to_be(shared, tmp_path) -> None:
    source = shared / "fixtures" / "tiny-llama3" / "meta-mp2" / "consolidated.00.pth"
    assert b"PK\6\7" in source.read_bytes()[-60:]
    assert "outside the file" in edited(source, tmp_path, put("<Q", 1 << 60)(b"PK\6\7", 8))
    assert "there is no 64-bit zip directory" in edited(source, tmp_path, put("<Q", 100)(b"PK\6\7", 8))
    assert "directories differ" in edited(source, tmp_path, put("<Q", 7)(b"PK\6\6", 40))
    assert "there is no 64-bit" in edited(source, tmp_path, put("<Q", 1 << 60)(b"PK\6\6", 32))

    # With the 32-bit fields marked unknown, the 64-bit ones alone decide, and are judged.
    def huge(data: bytearray) -> None:
        struct.pack_into("<HHII", data, data.rindex(END) + 8, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        struct.pack_into("<QQQ", data, data.rindex(b"PK\6\6") + 24, 1 << 40, 1 << 40, 1 << 50)

    assert "expected at most" in edited(source, tmp_path, huge)


def test_a_file_cut_anywhere_is_refused_in_one_line(shared, tmp_path) -> None:
    data = (shared / "fixtures" / "tiny-draft" / "meta-mp2-llama2" / "consolidated.00.pth").read_bytes()
    path = tmp_path / "a.pth"
    for size in (0, 1, 3, 4, 21, 22, 100, 5000, len(data) // 2, len(data) - 100, len(data) - 23, len(data) - 1):
        path.write_bytes(data[:size])
        refusal(path)


def test_entries_whose_sizes_stand_behind_the_data_are_read(shared) -> None:
    """As torch writes them: flag 3, zeros in the local header, padding before the data."""
    path = shared / "fixtures" / "tiny-llama3" / "meta-mp1" / "consolidated.00.pth"
    assert int.from_bytes(path.read_bytes()[6:8], "little") & 8
    entries = read_zip(SourceFile(path))
    assert entries["consolidated.00/data/0"].begin % 64 == 0
    assert entries["consolidated.00/data/0"].size == 512 * 64 * 4


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2), "before 1.6"),
        (pickle.dumps({"w": 1}, 2), "a bare pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (b"GGUF\3\0\0\0", "no file of torch.save"),
    ],
)
def test_other_files_by_that_name_are_told_apart(data, named, tmp_path) -> None:
    (tmp_path / "a.pth").write_bytes(data)
    assert named in refusal(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"byteorder": b"big"}, "byte order big: expected little"),
        ({"byteorder": b"x" * 100}, "byteorder has 100 bytes"),
        ({"constants.pkl": b"\x80\x02)."}, "TorchScript"),
        ({"other/data.pkl": b"\x80\x02}."}, "expected one data.pkl"),
    ],
)
def test_other_archives_of_torch_are_told_apart(entries, named, tmp_path) -> None:
    assert named in refusal(write_zip(tmp_path / "a.pth", entries_of(GOOD) | entries))


def test_a_zip_without_a_pickle_is_refused(tmp_path) -> None:
    assert "expected one data.pkl" in refusal(write_zip(tmp_path / "a.pth", {"x": b"y"}))
    assert "expected a state dict" in refusal(write_zip(tmp_path / "a.pth", {"data.pkl": pickled([1])}))
