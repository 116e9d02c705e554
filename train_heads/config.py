"""What a run is: frozen records, one flag per field. ``--print-config`` shows them, and nothing else decides."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from jaxspec.errors import UserError

Kind = Literal["medusa", "eagle", "eagle3", "draft"]
KINDS: Final = ("medusa", "eagle", "eagle3", "draft")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how it is cut."""

    row: int = 512  # tokens of a packed row, a multiple of 128 (or one shorter row)
    rows: int = 8  # rows of a step, over all devices and accumulated parts
    held_out: float = 0.05  # share of the documents that is never trained on
    seed: int = 0  # of the order and of the held-out part


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) with warm-up and a cosine to ``final`` of the peak."""

    learning_rate: float = 1e-3
    steps: int = 1000
    warmup: int = 50
    final: float = 0.1
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    clip: float = 0.5  # global norm of the gradient
    accumulate: int = 1  # parts that a step's rows are taken in, one after the other


@dataclasses.dataclass(frozen=True)
class MedusaOptions:
    """Medusa-1."""

    heads: int = 4
    layers: int = 1  # residual blocks of a head
    own_lm_head: bool = False  # False: the target's
    decay: float = 0.8
    learn_law: bool = False  # the target's law instead of the token that was said
    draft_vocab_size: int | None = None  # ids that are learnt, the most frequent ones of the answers; None: all


@dataclasses.dataclass(frozen=True)
class EagleOptions:
    """EAGLE-1."""

    token_weight: float = 0.1
    noise: float = 0.1
    draft_vocab_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Eagle3Options:
    """EAGLE-3."""

    unroll: int = 4  # steps that the head is fed its own outputs for, the first included
    decay: float = 0.8
    draft_vocab_size: int | None = None  # of the head itself


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """A distilled draft."""

    layers: int = 4
    draft_vocab_size: int | None = None


OPTIONS: Final = {"medusa": MedusaOptions, "eagle": EagleOptions, "eagle3": Eagle3Options, "draft": DraftOptions}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that a run's result depends on, but the files themselves."""

    kind: Kind
    target: str
    data: str
    out: str
    mesh: str = "auto"
    dtype: str = "float32"  # of the computation; masters are float32
    seed: int = 0  # of the parameters and of noise
    save_every: int = 100  # steps
    evaluate_every: int = 100  # steps
    keep: int = 2  # checkpoints besides the best
    features: str = "auto"  # of the target: disk, recompute, or by size and number of epochs
    serve: int = 8  # held-out prompts that the serving engine decodes before and after training; 0: none
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
