"""What a run is: frozen records, one flag per field. ``--print-config`` shows them, and nothing else decides."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from jaxspec.errors import UserError

Kind = Literal["medusa", "eagle", "eagle3", "draft"]
KINDS: Final = ("medusa", "eagle", "eagle3", "draft")


def _option(default: Any, help: str) -> Any:
    """A field that is also a flag of the command line, with this help."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how it is cut."""

    row: int = _option(512, "tokens of a packed row: at most 128, or a multiple of 128")
    rows: int = _option(8, "rows of a step, over all devices and accumulated parts")
    held_out: float = _option(0.05, "share of the documents that is never trained on")
    seed: int = _option(0, "of the order of rows and of the held-out part")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) with warm-up and a cosine to ``final`` of the peak."""

    learning_rate: float = _option(1e-3, "peak of the learning rate")
    steps: int = _option(1000, "optimiser steps")
    warmup: int = _option(50, "steps until the peak")
    final: float = _option(0.1, "share of the peak at the last step")
    weight_decay: float = _option(0.0, "of matrices")
    b1: float = _option(0.9, "decay of the first moment")
    b2: float = _option(0.95, "decay of the second moment")
    clip: float = _option(0.5, "global norm that a gradient is cut to")
    accumulate: int = _option(1, "parts that a step's rows are taken in, one after the other")


_WORDS: Final = "ids that are learnt, the most frequent ones of the answers; default all"


@dataclasses.dataclass(frozen=True)
class MedusaOptions:
    """Medusa-1."""

    heads: int = _option(4, "heads: tokens drafted after the pending one")
    layers: int = _option(1, "residual blocks of a head")
    own_lm_head: bool = _option(False, "an LM head for each head, instead of the target's")
    decay: float = _option(0.8, "head i counts decay ** i")
    learn_law: bool = _option(False, "learn the target's law instead of the token that was said")
    draft_vocab_size: int | None = _option(None, _WORDS)


@dataclasses.dataclass(frozen=True)
class EagleOptions:
    """EAGLE-1."""

    token_weight: float = _option(0.1, "of the cross-entropy beside the regression of features")
    noise: float = _option(0.1, "half the width of the uniform noise on features")
    draft_vocab_size: int | None = _option(None, _WORDS)


@dataclasses.dataclass(frozen=True)
class Eagle3Options:
    """EAGLE-3."""

    unroll: int = _option(4, "steps that the head is fed its own outputs for, the first included")
    decay: float = _option(0.8, "step k counts decay ** k")
    draft_vocab_size: int | None = _option(None, f"{_WORDS}; also the size of the head's own LM head")


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """A distilled draft."""

    layers: int = _option(4, "layers, taken evenly from the target's")
    draft_vocab_size: int | None = _option(None, _WORDS)


OPTIONS: Final = {"medusa": MedusaOptions, "eagle": EagleOptions, "eagle3": Eagle3Options, "draft": DraftOptions}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that a run's result depends on, but the files themselves."""

    kind: Kind
    target: str
    data: str
    out: str
    mesh: str = _option("auto", "auto, a device count, or data=4,model=1")
    dtype: str = _option("float32", "of the computation, float32 or bfloat16; masters are float32")
    seed: int = _option(0, "of the parameters and of noise")
    start_from: str | None = _option(None, "heads of an earlier run to start from; they keep the ids that they learnt")
    save_every: int = _option(100, "steps between checkpoints")
    evaluate_every: int = _option(100, "steps between evaluations on what is held out")
    keep: int = _option(2, "checkpoints kept besides the best")
    features: str = _option("auto", "of the target: disk, recompute, or auto (by size and number of epochs)")
    serve: int = _option(8, "held-out prompts that the serving engine decodes before and after training; 0: none")
    batches: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    options: MedusaOptions | EagleOptions | Eagle3Options | DraftOptions = dataclasses.field(
        default_factory=MedusaOptions
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if not isinstance(self.options, OPTIONS[self.kind]):
            raise UserError(f"options: expected those of {self.kind}, got {type(self.options).__name__}")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype: expected float32 or bfloat16, got {self.dtype!r}")
        if self.features not in ("auto", "disk", "recompute"):
            raise UserError(f"features: expected auto, disk or recompute, got {self.features!r}")
        if self.keep < 1 or self.serve < 0:
            raise UserError(f"keep, serve: expected at least 1 and 0, got {self.keep} and {self.serve}")
        _check_batches(self.batches, self.optim)
        for name in ("save_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: expected at least 1 step, got {getattr(self, name)}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunConfig":
        """The inverse of :meth:`to_json`. Unknown keys raise UserError, all of them named."""
        values = dict(data)
        kind = values.get("kind")
        if kind not in KINDS:
            raise UserError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        parts: dict[str, Any] = {"batches": DataConfig, "optim": OptimConfig, "options": OPTIONS[kind]}
        for name, record in parts.items():
            values[name] = _made(record, values.get(name, {}), f"{name}.")
        return _made(cls, values, "")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


def _made(record: Any, values: Mapping[str, Any], prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{prefix[:-1]}: expected a JSON object, got {values!r}")
    fields = {field.name: field for field in dataclasses.fields(record)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UserError(f"config: unknown keys {', '.join(prefix + name for name in unknown)}")
    needed = [name for name, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise UserError(f"config: missing keys {', '.join(prefix + name for name in missing)}")
    for name, value in values.items():
        default = fields[name].default
        if isinstance(default, bool) != isinstance(value, bool) and isinstance(default, bool | int | float):
            raise UserError(f"{prefix}{name}: expected a value like {default!r}, got {value!r}")
        if isinstance(default, int | float) and not isinstance(value, int | float):
            raise UserError(f"{prefix}{name}: expected a number, got {value!r}")
        if isinstance(default, int) and not isinstance(default, bool) and not isinstance(value, int):
            raise UserError(f"{prefix}{name}: expected an integer, got {value!r}")
    return record(**values)


def _check_batches(batches: DataConfig, optim: OptimConfig) -> None:
    if batches.row < 8 or (batches.row > 128 and batches.row % 128):
        raise UserError(f"batches.row: expected 8 to 128, or a multiple of 128, got {batches.row}")
    if batches.rows < 1 or optim.accumulate < 1 or batches.rows % optim.accumulate:
        raise UserError(f"batches.rows: expected a multiple of optim.accumulate={optim.accumulate}, got {batches.rows}")
    if not 0 <= batches.held_out < 1:
        raise UserError(f"batches.held_out: expected a share in [0, 1), got {batches.held_out}")
    if optim.steps < 1 or not 0 <= optim.warmup <= optim.steps:
        raise UserError(f"optim.warmup: expected 0 to optim.steps={optim.steps}, got {optim.warmup}")
