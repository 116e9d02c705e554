"""Files of torch.save are read without torch: the values are right, and no pickle can do more than describe tensors."""

import collections
import hashlib
import os
import pickle
import struct
import subprocess
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.pth import read_pth
from checkpoints_convert.readers.stored_zip import read_zip
from jaxspec.errors import UserError
from tests.convert.meta_makers import (
    StorageRef,
    View,
    contiguous,
    entries_of,
    pickled,
    write_pth,
    write_zip,
)

FLOATS = np.arange(24, dtype=np.float32)


def read(path):
    return read_pth(SourceFile(path))


def refusal(path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(UserError) as caught:
        read(path)
    line = str(caught.value)
    assert line.isprintable()
    assert path.name in line
    return line


@pytest.mark.parametrize(
    ("torch_file", "twin"),
    [
        ("medusa/medusa_lm_head.pt", "medusa/medusa_lm_head.safetensors"),
        ("eagle3/pytorch_model.bin", "eagle3/model.safetensors"),
    ],
)
def test_a_file_by_torch_equals_its_safetensors_twin(shared, torch_file, twin) -> None:
    """Float16 (read as float32), int64 and bool, by two libraries."""
    tensors = read(shared / "fixtures" / torch_file)
    with safe_open(shared / "fixtures" / twin, framework="numpy") as file:
        names = list(file.keys())
        assert set(tensors) == set(names)
        for name in names:
            expected = file.get_tensor(name)
            got = tensors[name].read()
            assert got.dtype == tensors[name].dtype == (np.float32 if expected.dtype == np.float16 else expected.dtype)
            assert got.shape == tensors[name].shape == expected.shape
            assert np.array_equal(got, expected.astype(got.dtype)), name


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_type_and_pickle_protocol_gives_the_stored_values(protocol, tmp_path) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((5, 7)).astype(np.float32)
    values[0, :4] = [np.nan, -0.0, np.inf, 1e-40]
    tensors = {
        "f32": values,
        "f16": values.astype(np.float16),
        "bf16": values.astype(ml_dtypes.bfloat16),
        "i64": np.array([2**40, -1]),
        "i32": np.array([[2**30], [-5]], np.int32),
        "bool": np.array([True, False, True]),
        "scalar": np.float32(3.5).reshape(()),
        "empty": np.zeros((0, 3), np.float32),
    }
    got = read(write_zip(tmp_path / "a.pth", entries_of(tensors, protocol)))
    assert list(got) == list(tensors)
    for name, expected in tensors.items():
        wide = expected.astype(np.float32) if name == "f16" else expected
        array = got[name].read()
        assert (array.shape, array.dtype) == (expected.shape, wide.dtype), name
        assert (got[name].shape, got[name].dtype) == (expected.shape, wide.dtype), name
        assert array.tobytes() == wide.tobytes(), name
        if array.ndim:
            assert got[name].peek(1, 2).tobytes() == wide[1:2].tobytes(), name


def test_views_of_one_storage_and_other_orders_of_its_elements(tmp_path) -> None:
    """What a state dict may hold: slices of a shared storage, transposed ones, parameters, module versions."""
    storage = StorageRef("FloatStorage", "0", 24)
    state = collections.OrderedDict(
        rows=contiguous(storage, (2, 4), offset=8),
        transposed=View(storage, 0, (4, 6), (1, 4)),
        turned=View(storage, 0, (3, 2, 4), (4, 12, 1)),
        loose=View(storage, 0, (1, 24), (999, 1)),
        column=View(storage, 0, (24, 1), (1, 7)),
        parameter=View(storage, 0, (24,), (1,), "parameter"),
        untyped=View(StorageRef("UntypedStorage", "0", 96), 4, (20,), (1,), "v3"),
    )
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    got = read(write_zip(tmp_path / "a.pth", {"data.pkl": pickled(state), "data/0": FLOATS.tobytes()}))
    expected = {
        "rows": FLOATS[8:16].reshape(2, 4),
        "transposed": FLOATS.reshape(6, 4).T,
        "turned": FLOATS.reshape(2, 3, 4).transpose(1, 0, 2),
        "loose": FLOATS[None],
        "column": FLOATS[:, None],
        "parameter": FLOATS,
        "untyped": FLOATS[4:],
    }
    assert set(got) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(got[name].read(), array), name
        assert np.array_equal(got[name].peek(0, len(array)), array), name
        assert np.array_equal(got[name].peek(1, 2), array[1:2]), name


@pytest.mark.parametrize(
    ("view", "named"),
    [
        (View(StorageRef("FloatStorage", "0", 24), 0, (3, 4), (8, 1)), "leaves gaps or repeats"),
        (View(StorageRef("FloatStorage", "0", 24), 0, (1 << 40, 24), (0, 1)), "leaves gaps or repeats"),
        (View(StorageRef("FloatStorage", "0", 24), 20, (5,), (1,)), "from element 20 on need 100 bytes"),
        (View(StorageRef("FloatStorage", "0", 24), 0, (1 << 40,), (1,)), "need 4398046511104 bytes"),
        (View(StorageRef("FloatStorage", "0", 25), 0, (24,), (1,)), "said to have 100 bytes, the file holds 96"),
        (View(StorageRef("HalfStorage", "0", 24), 0, (24,), (1,)), "said to have 48 bytes, the file holds 96"),
        (View(StorageRef("FloatStorage", "../0", 24), 0, (24,), (1,)), "storage ../0 is not in the file"),
        (View(StorageRef("DoubleStorage", "0", 12), 0, (12,), (1,)), "DoubleStorage"),
        (View(StorageRef("FloatStorage", "0", 24), -1, (2,), (1,)), "a stride of whole numbers"),
        (View(StorageRef("FloatStorage", "0", 24), 0, (-2,), (1,)), "a stride of whole numbers"),
        (View(StorageRef("FloatStorage", "0", 24), 0, (2, 2), (1,)), "a stride of whole numbers"),
        (View(StorageRef("FloatStorage", "0", 24), 0, (1,) * 9, (1,) * 9), "at most 8 dimensions"),
        (View(StorageRef("FloatStorage", "0", 24), 0, (24,), (1,), "v3"), "an untyped tensor"),
    ],
)
def test_a_view_outside_its_storage_is_refused(view, named, tmp_path) -> None:
    path = write_zip(tmp_path / "a.pth", {"data.pkl": pickled({"w": view}), "data/0": FLOATS.tobytes()})
    assert named in refusal(path)


def test_everything_wrong_is_told_at_once(tmp_path) -> None:
    state = {
        "step": 7,
        "model": {"w": 1},
        "a": contiguous(StorageRef("FloatStorage", "9", 2), (2,)),
        "b": View(StorageRef("FloatStorage", "0", 24), 0, (2, 2), (3, 1)),
        3: None,
    }
    line = refusal(write_zip(tmp_path / "a.pth", {"data.pkl": pickled(state), "data/0": FLOATS.tobytes()}))
    assert len(line.split("; a.pth: ")) == 5
    for named in ("step: expected a tensor, found int", "expected a flat state dict", "a: its storage 9", "b: size"):
        assert named in line


def test_a_name_with_a_line_break_cannot_forge_a_message(tmp_path) -> None:
    state = {"a\nerror: all is well": contiguous(StorageRef("FloatStorage", "0", 24), (24,))}
    line = refusal(write_zip(tmp_path / "a.pth", {"data.pkl": pickled(state), "data/0": FLOATS.tobytes()}))
    assert "expected the name of a tensor" in line


def test_read_in_the_order_of_places_a_file_is_gone_through_once(shared) -> None:
    path = shared / "fixtures" / "tiny-llama3" / "meta-mp1" / "consolidated.00.pth"
    file = SourceFile(path)
    tensors = sorted(read_pth(file).values(), key=lambda tensor: tensor.place)
    assert file.unread == file.size
    seen = file.size
    for tensor in tensors:
        tensor.read()
        assert file.unread < seen
        seen = file.unread
    assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


# Pickles that would run code if something loaded them. Each is first shown to work on Python's own unpickler.


class Runs:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(mark: str) -> dict[str, tuple[bytes, str]]:
    """Pickles that make the file ``mark``, and the global that each must be refused by."""
    command = f"touch {mark}"
    text = command.encode()
    source = f"open({mark!r}, 'w').close()"
    nested = {"w": [({"deep": Runs(os.system, command)},)]}
    short = bytes([len(text)]) + text
    return {
        "reduce": (pickle.dumps(Runs(os.system, command), 2), "posix.system"),
        "eval": (pickle.dumps({"w": Runs(eval, source)}, 2), "__builtin__.eval"),
        "exec": (pickle.dumps({"w": Runs(exec, source)}, 4), "builtins.exec"),
        "nested": (pickle.dumps(nested, 2), "posix.system"),
        "stack global": (pickle.dumps(Runs(os.system, command), 4), "posix.system"),
        "popen": (pickle.dumps(Runs(subprocess.Popen, ["touch", mark]), 4), "subprocess.Popen"),
        "inst": (b"(S'" + text + b"'\nios\nsystem\n.", "S"),  # the string of protocol 0 is refused before
        "inst with text": (b"(X" + struct.pack("<I", len(text)) + text + b"ios\nsystem\n.", "os.system"),
        "obj": (b"(cos\nsystem\nX" + struct.pack("<I", len(text)) + text + b"o.", "os.system"),
        "dotted": (
            b"\x80\x04\x8c\x08builtins\x8c\x0deval.__call__\x93\x8c" + short + b"\x85R.",
            "builtins.eval.__call__",
        ),
        "newobj": (b"\x80\x02cos\nsystem\nX" + struct.pack("<I", len(text)) + text + b"\x85\x81.", "os.system"),
        "getattr": (b"\x80\x02c__builtin__\ngetattr\n.", "__builtin__.getattr"),
        "torch itself": (b"\x80\x02ctorch\nload\nX" + struct.pack("<I", len(text)) + text + b"\x85R.", "torch.load"),
        "torch internals": (b"\x80\x02ctorch.storage\n_load_from_bytes\n.", "torch.storage._load_from_bytes"),
        "numpy": (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n.", "numpy.core.multiarray._reconstruct"),
        "a whole model": (b"\x80\x02c__main__\nModel\n)\x81.", "__main__.Model"),
        "close to a storage": (b"\x80\x02ctorch\nFloatStorage.from_file\n.", "torch.FloatStorage.from_file"),
    }


RUNNABLE = ("reduce", "eval", "exec", "nested", "stack global", "popen", "inst", "inst with text", "obj")


@pytest.mark.parametrize("kind", list(hostile("x")))
def test_a_pickle_that_asks_for_another_global_is_refused_by_its_name(kind, tmp_path) -> None:
    """Nothing is imported, called or built: the mark that the pickle would leave is not there."""
    mark = tmp_path / "mark"
    data, named = hostile(str(mark))[kind]
    path = write_zip(tmp_path / "consolidated.00.pth", {"data.pkl": data})
    line = refusal(path)
    assert named in line
    assert not mark.exists()
    if kind in RUNNABLE:  # or the test would prove nothing
        result = pickle.loads(data)
        if kind == "popen":
            result.wait()
        assert mark.exists()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02\x83\x01\x02.", "EXT2"),
        (b"\x80\x02\x84\x01\x02\x03\x04.", "EXT4"),
        (b"\x80\x02P1\n.", "PERSID"),
        (b"\x80\x04)}\x92.", "NEWOBJ_EX"),
        (b"\x80\x02)\x81.", "NEWOBJ"),
        (b"\x80\x02(o.", "OBJ"),
        (b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00x.", "BYTEARRAY8"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x02K\x012.", "DUP"),
        (b"\x80\x02\xff.", "byte 255"),
        (b"\x80\x02K\x01Q.", "persistent id that is a int"),
        (b"\x80\x02(X\x07\x00\x00\x00storageX\x01\x00\x00\x00aX\x01\x00\x00\x000tQ.", "persistent id that is a tuple"),
        (b"\x80\x02}X\x0c\x00\x00\x00__setstate__K\x01sb.", "where there is none"),
        (b"\x80\x02}}X\x0c\x00\x00\x00__setstate__K\x01sb.", "sets the state of a dict"),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "sets the state of collections.OrderedDict"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.", "calls collections.OrderedDict with 1 arguments"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage with 0 arguments"),
        (b"\x80\x02K\x01)R.", "calls a int with a tuple"),
        (b"\x80\x02}]K\x01s.", "a list as a key"),
        (b"\x80\x02K\x01K\x01a.", "appends to a int"),
        (b"\x80\x02h\x05.", "refers to value 5"),
        (b"\x80\x02}}.", "ends with 2 values"),
        (b"\x80\x02.", "ends with 0 values"),
        (b"\x80\x02t.", "closes a list"),
        (b"\x80\x02(0.", "POP"),
        (b"\x80\x02}", "needs 1 bytes"),
        (b"\x80\x02c" + b"a" * 300, "a name in the pickle without an end"),
        (b"\x80\x02X\x02\x00\x00\x00\xff\xff.", "not UTF-8"),
        (b"\x80\x02\x8a\x09" + b"\x01" * 9 + b".", "an integer of 9 bytes"),
        (b"\x80\x02\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20) + b".", "an integer of 1048576 bytes"),
        (b"", "needs 1 bytes"),
    ],
)
def test_instructions_that_no_state_dict_needs_are_refused(data, named, tmp_path) -> None:
    """The extension registry, classes with states, odd persistent ids, stacks that do not add up."""
    assert named in refusal(write_zip(tmp_path / "a.pth", {"data.pkl": data}))


BOMBS = {
    "a long integer": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\1" * 100,
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "a text of 8 EB": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "many nested tuples": b"\x80\x02)" + b"\x85" * 300_000 + b".",
    "many nested lists": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00ah\x00h\x00\x86.",
    "a dict in itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "references that double": b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 100_000 + b"h\x00.",
    "a doubling key": b"\x80\x02}K\x01q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"h\x00s.",
    "many marks": b"\x80\x02" + b"(" * 300_000 + b".",
    "many memos": b"\x80\x04K\x01" + b"\x94" * 300_000 + b".",
    "many dicts": b"\x80\x02(" + b"}" * 300_000 + b"t.",
    "too long a pickle": b"\x80\x02" + b"K\x010" * 2_000_000 + b".",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_pickle_bomb_is_refused_in_bounded_memory(kind, tmp_path) -> None:
    path = write_zip(tmp_path / "a.pth", {"data.pkl": BOMBS[kind]})
    tracemalloc.start()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()


def test_a_dict_in_itself_is_no_tensor(tmp_path) -> None:
    path = write_zip(tmp_path / "a.pth", {"data.pkl": BOMBS["a dict in itself"]})
    assert "a: expected a tensor, found a dict" in refusal(path)


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
