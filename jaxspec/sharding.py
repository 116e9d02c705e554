"""The device mesh, and the one table that maps logical axes to mesh axes.

Parameters, caches and activations name their axes; nothing else in the project knows a mesh axis. A logical axis whose
size its mesh axis does not divide is replicated, and :meth:`Sharding.describe` says so.
"""

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import UserError

MESH_AXES: Final = ("data", "model")

# Logical axis -> mesh axis (None: replicated). A query head belongs to its kv head's group and moves with it.
RULES: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "batch": "data",
        "kv_heads": "model",
        "ffn": "model",
        "vocab": "model",
        "embed": None,
        "head_dim": None,
        "slots": None,
        "tokens": None,
    }
)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh together with the rules. Hashable: modules hold it as a static attribute."""

    mesh: Mesh

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes. Two axes on one mesh axis raise ValueError."""
        if len(axes) != len(shape):
            raise ValueError(f"axes {axes}: expected one per dimension of {shape}")
        wanted = [None if axis is None else RULES[axis] for axis in axes]
        for mesh_axis in MESH_AXES:
            if wanted.count(mesh_axis) > 1:
                raise ValueError(f"axes {axes}: two of them map to mesh axis {mesh_axis!r}")
        return PartitionSpec(
            *(
                mesh_axis if mesh_axis is not None and size % self.mesh.shape[mesh_axis] == 0 else None
                for mesh_axis, size in zip(wanted, shape, strict=True)
            )
        )

    def named(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """:meth:`spec` on this mesh."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Inside a jit: fixes how ``x`` is laid out, by logical axes."""
        return jax.lax.with_sharding_constraint(x, self.named(axes, x.shape))

    def describe(self, arrays: Mapping[str, tuple[tuple[str | None, ...], tuple[int, ...]]]) -> list[str]:
        """One line per logical axis that had to be replicated because its mesh axis does not divide it."""
        lines = []
        for name, (axes, shape) in arrays.items():
            for axis, size in zip(axes, shape, strict=True):
                mesh_axis = None if axis is None else RULES[axis]
                if mesh_axis is not None and size % self.mesh.shape[mesh_axis]:
                    ways = self.mesh.shape[mesh_axis]
                    lines.append(f"{name}: {axis}={size} is not divisible by {mesh_axis}={ways}: replicated")
        return lines


def parse_mesh(text: str | Mapping[str, int], device_count: int) -> dict[str, int]:
    """Reads ``auto``, ``4``, ``data=1,model=4``, ``{"data": 1, "model": 4}`` or a mapping.

    ``auto`` takes every visible device on the model axis. Raises UserError when the shape needs more devices than
    there are.
    """
    if isinstance(text, str):
        text = text.strip()
        try:
            if text == "auto":
                shape = {"data": 1, "model": device_count}
            elif text.isdecimal():
                shape = {"data": 1, "model": int(text)}
            elif text.startswith("{"):
                shape = {"data": 1, "model": 1} | json.loads(text)
            else:
                named = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
                if len(dict(named)) < len(named):
                    raise ValueError("an axis is named twice")
                shape = {"data": 1, "model": 1} | dict(named)
        except ValueError as error:
            raise UserError(f"mesh: expected auto, N or data=D,model=M, got {text!r}") from error
    else:
        shape = {"data": 1, "model": 1} | dict(text)
    if set(shape) != set(MESH_AXES) or not all(type(size) is int and size >= 1 for size in shape.values()):
        raise UserError(f"mesh: expected positive sizes for the axes data and model, got {text!r}")
    needed = shape["data"] * shape["model"]
    if needed > device_count:
        raise UserError(f"mesh: {text!r} needs {needed} devices, {device_count} visible")
    return shape


def make_sharding(mesh: str | Mapping[str, int] = "auto") -> Sharding:
    """The mesh over the first devices, with automatic (GSPMD) axes; docs/decisions/mesh-axis-types.md says why."""
    devices = jax.devices()
    shape = parse_mesh(mesh, len(devices))
    grid = np.asarray(devices[: shape["data"] * shape["model"]]).reshape(shape["data"], shape["model"])
    return Sharding(Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto, AxisType.Auto)))
