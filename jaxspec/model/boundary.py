"""The NNX boundary: parameters travel as a flat dict by dotted name, modules are split and merged (docs/decisions)."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx


def param_name(path: tuple[Any, ...]) -> str:
    """The dotted parameter name of an NNX path: ('layers', 0, 'qkv', 'weight') -> 'layers.0.qkv'."""
    return ".".join(str(part) for part in path[:-1])


def merge(graphdef: Any, abstract: Any, params: Mapping[str, jax.Array]) -> Any:
    """The module over these parameters (inside a jit). ``abstract``: its nnx.State of ShapeDtypeStructs."""
    flat = nnx.to_flat_state(abstract)
    state = nnx.from_flat_state([(path, leaf.replace(params[param_name(path)])) for path, leaf in flat])
    return nnx.merge(graphdef, state)


def flat_params(module: nnx.Module, shardings: Mapping[str, jax.sharding.Sharding]) -> dict[str, jax.Array]:
    """A module's parameters by name, each in its sharding."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {param_name(path): jax.device_put(leaf[...], shardings[param_name(path)]) for path, leaf in flat}
