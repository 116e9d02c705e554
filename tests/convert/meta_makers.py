"""Small checkpoints of Meta's format, made without the code under test and without torch.

Pickles come from Python's own pickler: stand-ins for torch's classes are in ``sys.modules`` while it runs, so that it
writes the names that torch writes.
"""

import collections
import io
import json
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.convert.makers import Sizes, Tensors, hf_tensors, interleave

# D = N * H, as params.json implies; F is more than 8/3 D, so that ``multiple_of: F`` makes a feed-forward width of F.
META_SIZES = Sizes(V=53, D=24, F=71, N=6, K=2, H=4, L=3)

STORAGES = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.bool_): "BoolStorage",
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.uint8): "ByteStorage",
}


class StorageRef(NamedTuple):
    """What torch pickles as a persistent id."""

    kind: str
    key: str
    count: int


class View:
    """A tensor as torch pickles it."""

    def __init__(self, storage: StorageRef, offset: int, size: tuple, stride: tuple, rebuild: str = "v2") -> None:
        self.storage = storage
        self.rebuild = rebuild
        self.arguments = (storage, offset, size, stride, False, collections.OrderedDict())

    def __reduce__(self) -> Any:
        utils = sys.modules["torch._utils"]
        if self.rebuild == "parameter":
            plain = View(*self.arguments[:4])
            return utils._rebuild_parameter, (plain, True, collections.OrderedDict())
        if self.rebuild == "v3":
            dtype = getattr(sys.modules["torch"], "float32")  # noqa: B009 - a stand-in's attribute
            return utils._rebuild_tensor_v3, (*self.arguments, dtype)
        return utils._rebuild_tensor_v2, self.arguments


def contiguous(storage: StorageRef, shape: tuple[int, ...], offset: int = 0) -> View:
    strides = tuple(int(np.prod(shape[axis + 1 :], dtype=int)) for axis in range(len(shape)))
    return View(storage, offset, shape, strides)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, StorageRef):
            return ("storage", getattr(sys.modules["torch"], obj.kind), obj.key, "cpu", obj.count)
        return None


@contextmanager
def _torch_names() -> Iterator[None]:
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for kind in (*STORAGES.values(), "UntypedStorage", "float32"):
        setattr(torch, kind, type(kind, (), {"__module__": "torch"}))
    for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"):
        function = types.FunctionType((lambda *_: None).__code__, {}, name)
        function.__module__, function.__qualname__ = "torch._utils", name
        setattr(utils, name, function)
    before = {name: sys.modules.get(name) for name in ("torch", "torch._utils")}
    sys.modules["torch"], sys.modules["torch._utils"] = torch, utils
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def pickled(state: Any, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    with _torch_names():
        _Pickler(out, protocol).dump(state)
    return out.getvalue()


def write_zip(path: Path, entries: dict[str, bytes], folder: str = "archive") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(f"{folder}/{name}", data)
    return path


def entries_of(tensors: Tensors, protocol: int = 2) -> dict[str, bytes]:
    """The entries of a torch file of contiguous tensors, each with a storage of its own."""
    state = collections.OrderedDict(
        (name, contiguous(StorageRef(STORAGES[array.dtype], str(number), array.size), array.shape))
        for number, (name, array) in enumerate(tensors.items())
    )
    storages = {f"data/{number}": array.tobytes() for number, array in enumerate(tensors.values())}
    return {"data.pkl": pickled(state, protocol), "byteorder": b"little", **storages, "version": b"3\n"}


def write_pth(path: Path, tensors: Tensors) -> Path:
    return write_zip(path, entries_of(tensors), path.name.removesuffix(".pth"))


__all__ = ["hf_tensors"]

META_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.k_proj.weight": "attention.wk.weight",
    "self_attn.v_proj.weight": "attention.wv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}


def meta_tensors(tensors: Tensors, sizes: Sizes = META_SIZES) -> Tensors:
    """Weights under Hugging Face names under their Meta names, q and k rows interleaved."""
    found: Tensors = {}
    for name, array in tensors.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"layers.{layer}.{META_NAMES[rest]}"
        else:
            name = META_NAMES[name]
        if name.endswith(("wq.weight", "wk.weight")):
            array = interleave(array, sizes.N if name.endswith("wq.weight") else sizes.K)
        found[name] = array
    return found


def params(sizes: Sizes = META_SIZES, **changes: Any) -> dict[str, Any]:
    """params.json; a change to ``...`` removes the key."""
    values: dict[str, Any] = {
        "dim": sizes.D,
        "n_layers": sizes.L,
        "n_heads": sizes.N,
        "n_kv_heads": sizes.K,
        "vocab_size": sizes.V,
        "multiple_of": sizes.F,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    return {key: value for key, value in (values | changes).items() if value is not ...}


def split(tensors: Tensors, ranks: int, embed_axis: int = 0) -> list[Tensors]:
    """A model-parallel set: rows of wq, wk, wv, w1, w3, output; columns of wo, w2; norms in every file."""
    shards: list[Tensors] = [{} for _ in range(ranks)]
    for name, array in tensors.items():
        if array.ndim == 1:
            pieces = [array] * ranks
        else:
            by_columns = name.endswith(("wo.weight", "w2.weight")) or (name == "tok_embeddings.weight" and embed_axis)
            pieces = np.array_split(array, ranks, axis=1 if by_columns else 0)
        for shard, piece in zip(shards, pieces, strict=True):
            shard[name] = np.ascontiguousarray(piece)
    return shards


def write_meta(folder: Path, values: dict[str, Any], shards: list[Tensors]) -> Path:
    """A folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(values))
    for rank, tensors in enumerate(shards):
        write_pth(folder / f"consolidated.{rank:02}.pth", tensors)
    return folder
