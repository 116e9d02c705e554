"""Files of torch.save are read without torch: the values are right, and no pickle can do more than describe tensors."""

import collections
import hashlib
import os
import pickle
import struct
import subprocess
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.pth import read_pth
from tests.convert.meta_makers import (
    StorageRef,
    View,
    contiguous,
    entries_of,
    pickled,
    write_zip,
)
from tests.convert.pth_files import FLOATS, read, refusal


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
