"""Opening a checkpoint folder: its parts must agree before a weight is read."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from jaxspec.checkpoint.manifest import MANIFEST, Manifest, contradictions, grouped
from jaxspec.checkpoint.packed import ENDS, is_packed
from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import HeadsConfig, heads_config_from_json
from jaxspec.model.heads.params import heads_param_specs
from jaxspec.model.params import ParamSpec, param_specs

ConfigT = TypeVar("ConfigT")


@dataclasses.dataclass(frozen=True)
class Checkpoint(Generic[ConfigT]):
    """An opened checkpoint folder; its weights are still on disk."""

    path: Path
    config: ConfigT
    specs: Mapping[str, ParamSpec]  # of every parameter, in checkpoint order
    manifest: Manifest
    tokenizer_dir: Path | None

    def groups(self) -> dict[str, list[str]]:
        """Names of the stored tensors by group, in checkpoint order."""
        return grouped(self.manifest.tensors)


def open_checkpoint(path: str | Path, *, beside_target: bool = False) -> Checkpoint[LlamaConfig]:
    """Opens a converted model and checks that its parts agree. No weight is read.

    ``beside_target``: a draft may lack parameters that it shares with its target. Raises UserError naming everything
    that is missing, unknown or contradictory.
    """
    path, data, manifest = read_head(path)
    if "method" in data:
        raise UserError(f"{path}: expected a model, found {data['method']} heads (give them with --heads)")
    if manifest.shared and not beside_target:
        shared = ", ".join(manifest.shared)
        raise UserError(
            f"{path}: a draft that takes {shared} from its target: give it with --draft, beside that target"
        )
    config = LlamaConfig.from_json(data)
    return agreed(path, config, param_specs(config), manifest)


def open_heads(path: str | Path) -> Checkpoint[HeadsConfig]:
    """Opens converted speculative heads and checks that their parts agree. No weight is read.

    Whether they fit a target is another question: ``jaxspec.model.heads.config.misfits``. Raises UserError naming
    everything that is missing, unknown or contradictory.
    """
    path, data, manifest = read_head(path)
    if "method" not in data:
        raise UserError(f"{path}: expected speculative heads, found a model (give it with --target or --draft)")
    config = heads_config_from_json(data)
    return agreed(path, config, heads_param_specs(config), manifest)


def open_any(path: str | Path) -> Checkpoint[LlamaConfig] | Checkpoint[HeadsConfig]:
    """Opens a model or heads, whichever the folder holds. Raises UserError as those two do."""
    return open_heads(path) if "method" in read_head(path)[1] else open_checkpoint(path, beside_target=True)


def read_head(path: str | Path) -> tuple[Path, Mapping[str, Any], Manifest]:
    """config.json, not yet interpreted, and the manifest of a checkpoint folder of any kind."""
    path = Path(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise UserError(f"{path}: expected the folder of a converted checkpoint, found {found}")
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path}: expected a converted checkpoint, found no {MANIFEST} (make one with jaxspec-convert)")
    manifest = Manifest.from_json(read_json(path / MANIFEST), f"{path / MANIFEST}")
    config = read_json(path / "config.json")
    if not isinstance(config, Mapping):
        raise UserError(f"{path / 'config.json'}: expected a JSON object, got {type(config).__name__}")
    return path, config, manifest


def agreed(path: Path, config: ConfigT, specs: Mapping[str, ParamSpec], manifest: Manifest) -> Checkpoint[ConfigT]:
    """The opened folder. Raises UserError unless the manifest and the files are those of a model with ``specs``."""
    problems = [f"shared: no parameter {name} that a draft can share" for name in set(manifest.shared) - set(ENDS)]
    own = {name: spec for name, spec in specs.items() if name not in manifest.shared}
    problems += contradictions(own, manifest.tensors)
    if not is_packed(path):
        groups = grouped(manifest.tensors)
        problems += [f"params/{group} is missing" for group in groups if not (path / "params" / group).is_dir()]
    tokenizer_dir: Path | None = None
    if (path / "tokenizer").is_dir() or manifest.tokenizer_size is not None:
        tokenizer_dir = path / "tokenizer"
        if not (tokenizer_dir / "tokenizer.json").is_file():
            problems.append("tokenizer/tokenizer.json is missing")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return Checkpoint(path, config, specs, manifest, tokenizer_dir)


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises UserError when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent}: expected a file {path.name}, found none") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected JSON, got {error}") from None
