"""The safetensors writer: files that the library reads, tensors taken one at a time."""

import itertools
import tracemalloc
import weakref

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.export.safetensors import write_safetensors
from checkpoints_convert.readers.files import SourceFile
from checkpoints_convert.readers.safetensors import read_directory
from tests.convert.hf_folders import read_file

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MB = 1 << 20


def write(path, tensors, metadata=None) -> None:
    directory = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    write_safetensors(path, directory, tensors.__getitem__, metadata or {})


def every_type() -> dict[str, np.ndarray]:
    """Odd sizes, so that a tensor laid after a narrower one begins off its own step unless that is seen to."""
    rng = np.random.default_rng(5)
    return {
        "mask": rng.integers(0, 2, 13).astype(bool),
        "bf16": rng.standard_normal((7, 11), np.float32).astype(BFLOAT16),
        "f32": rng.standard_normal((3, 5, 7), np.float32),
        "f16": rng.standard_normal(17).astype(np.float16),
        "i64": rng.integers(-(1 << 60), 1 << 60, 19),
        "i32": rng.integers(-(1 << 30), 1 << 30, 23).astype(np.int32),
        "nothing": np.zeros((0, 4), np.float32),
        "größe.0": np.float32([1.5]),
    }


def test_the_library_reads_every_type_bit_for_bit(tmp_path) -> None:
    tensors = every_type()
    write(tmp_path / "all.safetensors", tensors)
    found = read_file(tmp_path / "all.safetensors")
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        assert (found[name].array.dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].data == array.tobytes(), name


def test_our_reader_reads_every_type_bit_for_bit(tmp_path) -> None:
    tensors = every_type()
    write(tmp_path / "all.safetensors", tensors)
    found = read_directory(SourceFile(tmp_path / "all.safetensors"))
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        got = found[name].read()
        expected = array.astype(np.float32) if array.dtype == np.float16 else array
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
        assert got.tobytes() == expected.tobytes(), name


def test_bfloat16_keeps_its_bits(tmp_path) -> None:
    """E18, the way out: NaN payloads, infinities, minus zero and subnormals."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    write(tmp_path / "x.safetensors", {"x": bits.view(BFLOAT16)})
    assert read_file(tmp_path / "x.safetensors")["x"].data == bits.tobytes()


def test_data_and_tensors_begin_at_multiples_of_their_size(tmp_path) -> None:
    """Whatever the order in which they are announced; readers look at mapped files in place."""
    tensors = {name: array for name, array in every_type().items() if array.size}
    narrow_first = sorted(tensors, key=lambda name: tensors[name].itemsize)
    for number, order in enumerate(itertools.islice(itertools.permutations(narrow_first), 0, 5040, 97)):
        path = tmp_path / f"{number}.safetensors"
        write(path, {name: tensors[name] for name in order})
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + header) % 8 == 0
        for name, tensor in read_directory(SourceFile(path)).items():
            assert tensor.place[1] % tensors[name].itemsize == 0, (order, name)
            assert read_file(path)[name].data == tensors[name].tobytes(), (order, name)


def test_the_metadata_is_in_the_header(tmp_path) -> None:
    import safetensors

    write(tmp_path / "x.safetensors", every_type(), {"format": "pt", "method": "medusa"})
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "method": "medusa"}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_views_of_a_leaf_are_written_in_their_own_order(tmp_path, dtype) -> None:
    leaf = np.arange(7 * 5 * 11 * 13, dtype=np.float32).reshape(7, 5, 11, 13).astype(dtype)
    views = {
        "part": leaf[:, 2],
        "strided": leaf[::2, 1:3],
        "turned": leaf.transpose(3, 1, 0, 2),
        "row": leaf[3],
        "column": leaf[0, 0, :, 4],
    }
    write(tmp_path / "x.safetensors", views)
    found = read_file(tmp_path / "x.safetensors")
    for name, view in views.items():
        assert found[name].data == view.tobytes(), name


def test_each_is_asked_for_once_and_let_go_before_the_next(tmp_path) -> None:
    order = ["c", "a", "b"]
    asked: list[str] = []
    alive: list[weakref.ref] = []

    def fill(name: str) -> np.ndarray:
        assert all(reference() is None for reference in alive), "the one before is still held"
        array = np.full((3, 5), ord(name), np.float32)
        asked.append(name)
        alive.append(weakref.ref(array))
        return array

    write_safetensors(tmp_path / "x", {name: (np.dtype(np.float32), (3, 5)) for name in order}, fill, {})
    assert asked == order
    assert {name: stored.array[0, 0] for name, stored in read_file(tmp_path / "x").items()} == {
        name: ord(name) for name in order
    }


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.T], ids=["contiguous", "turned"])
def test_memory_holds_one_tensor(tmp_path, view) -> None:
    """Twelve tensors of 32 MB; a turned one is copied 16 MB at a time."""
    shape = view(np.empty((2048, 4096), np.float32)).shape
    directory = {str(i): (np.dtype(np.float32), shape) for i in range(12)}
    tracemalloc.start()
    try:
        write_safetensors(tmp_path / "x", directory, lambda name: view(np.zeros((2048, 4096), np.float32)), {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (tmp_path / "x").unlink()
    assert 32 * MB <= peak < 32 * MB + 17 * MB, peak


@pytest.mark.parametrize(
    "given",
    [np.zeros((3, 5), np.float64), np.zeros((5, 3), np.float32), np.zeros(15, np.float32), np.zeros((3, 5), BFLOAT16)],
)
def test_something_else_than_announced_is_an_error(tmp_path, given) -> None:
    with pytest.raises(ValueError, match=r"x: announced as float32 \(3, 5\), filled with"):
        write_safetensors(tmp_path / "x", {"x": (np.dtype(np.float32), (3, 5))}, lambda name: given, {})


def test_what_the_format_cannot_hold_is_an_error_before_anything_is_written(tmp_path) -> None:
    for name, dtype, message in (
        ("x", np.dtype(np.complex64), "x: expected a dtype among F32, F16, BF16, I64, I32, BOOL, got complex64"),
        ("x", np.dtype(">f4"), "x: expected a dtype among"),
        ("__metadata__", np.dtype(np.float32), "__metadata__ is no name for a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            write_safetensors(tmp_path / "x", {name: (dtype, (1,))}, lambda name: np.zeros(1), {})
    assert not (tmp_path / "x").exists()
