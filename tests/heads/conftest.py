"""What the heads tests share: conversions, refusals, and heads that run on a mesh."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import ConversionError
from checkpoints_convert.heads import HeadsResult, convert_heads
from jaxspec.checkpoint import open_checkpoint, open_heads, read_group, restore_params
from jaxspec.model.cache import LayerCache
from jaxspec.model.heads.config import HeadsConfig
from jaxspec.model.heads.definition import HeadsDef, define_heads
from jaxspec.model.heads.parts import TargetTables
from jaxspec.model.llama import define
from jaxspec.sharding import make_sharding

Tree = dict[str, np.ndarray]
TARGETS = {"medusa": "tiny-llama3", "eagle1": "tiny-llama3", "eagle3": "tiny-llama3-8l"}


def tree(folder: Path) -> Tree:
    """Every stored tensor of a heads folder, by name."""
    heads = open_heads(folder)
    return {name: array for group in heads.groups() for name, array in read_group(heads, group).items()}


def same_bits(one: Tree, other: Tree) -> bool:
    """Equal names, dtypes, shapes and bytes."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., list[str]]:
    """``refused(src, **options)``: expects a refusal that leaves nothing behind; gives its findings."""

    def run(src: Path, **options: Any) -> list[str]:
        dst = tmp_path / "refused"
        with pytest.raises(ConversionError) as caught:
            convert_heads(src, dst, **options)
        assert not dst.exists()
        assert not list(tmp_path.glob(".*")), "a hidden sibling was left"
        assert all("\n" not in line for line in caught.value.findings)
        return list(caught.value.findings)

    return run


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., HeadsConfig]:
    """``converted(src, **options)``: converts to ``tmp_path / "out"`` and gives the config that is then on disk."""

    def run(src: Path, **options: Any) -> HeadsConfig:
        result = convert_heads(src, tmp_path / "out", force=True, **options)
        assert isinstance(result, HeadsResult)
        return open_heads(result.path).config

    return run


@dataclasses.dataclass
class Head:
    """Converted heads with their target's tables, on a mesh."""

    definition: HeadsDef
    params: Mapping[str, jax.Array]
    target_params: Mapping[str, jax.Array]
    target: Any  # ModelDef

    def _tables(self, target_params: Mapping[str, jax.Array]) -> TargetTables:
        model = self.target.merge(target_params)
        return TargetTables(model.embed, model.logits)

    def medusa(self, hidden_BTD: np.ndarray) -> np.ndarray:
        """[M, B, T, V]."""
        return np.asarray(self._medusa(self.params, self.target_params, hidden_BTD))

    def cache(self, rows: int, slots: int) -> LayerCache:
        return jax.jit(lambda: self.definition.empty_cache(rows, slots))().layers[0]

    def eagle(
        self, tokens_BT: np.ndarray, features: np.ndarray, positions_BT: np.ndarray, cache: LayerCache
    ) -> tuple[np.ndarray, np.ndarray, LayerCache]:
        """One pass: hidden [B, T, D], draft logits [B, T, d], cache."""
        hidden, logits, cache = self._eagle(self.params, self.target_params, tokens_BT, features, positions_BT, cache)
        return np.asarray(hidden), np.asarray(logits), cache

    def __post_init__(self) -> None:
        @jax.jit
        def run(params, target_params, tokens_BT, features, positions_BT, cache):
            module, tables = self.definition.merge(params), self._tables(target_params)
            hidden_BTD, cache = module(tokens_BT, features, positions_BT, cache, tables)
            return hidden_BTD, module.logits(hidden_BTD, tables), cache

        @jax.jit
        def run_medusa(params, target_params, hidden_BTD):
            return self.definition.merge(params)(hidden_BTD, self._tables(target_params))

        self._eagle, self._medusa = run, run_medusa


@pytest.fixture(scope="session")
def heads_folders(
    shared: Path, tiny_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``heads_folders(name)``: the authors' heads of a fixture, converted with their target."""
    home = tmp_path_factory.mktemp("heads")

    @lru_cache
    def folder(name: str) -> Path:
        convert_heads(shared / "fixtures" / name, home / name, target=tiny_models(TARGETS[name]))
        return home / name

    return folder


@pytest.fixture(scope="session")
def running(heads_folders: Callable[[str], Path], tiny_models: Callable[[str], Path]) -> Callable[[str, str], Head]:
    """``running(name, mesh)``: those heads and their target, float32, restored into the mesh's shardings."""

    @lru_cache
    def load(name: str, mesh: str) -> Head:
        sharding, dtype = make_sharding(mesh), jnp.dtype("float32")
        heads = open_heads(heads_folders(name))
        definition = define_heads(heads.config, sharding, dtype)
        checkpoint = open_checkpoint(tiny_models(TARGETS[name]))
        model = define(checkpoint.config, sharding, dtype)
        return Head(
            definition,
            restore_params(heads, definition.shardings(), dtype),
            restore_params(checkpoint, model.shardings(), dtype),
            model,
        )

    return load
