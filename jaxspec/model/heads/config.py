"""The frozen description of speculative heads. It is what ``config.json`` of a heads folder holds."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from jaxspec.errors import UserError
from jaxspec.model.config import LlamaConfig, RopeScaling, checked_fields

Method = Literal["medusa", "eagle", "eagle3"]

# How many levels of the target EAGLE-3 looks at where the head does not name its own.
EAGLE3_LEVELS: Final = 3


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """M heads on the target's hidden state after its final norm; head i at position t guesses token t + 2 + i.

    Each head is ``num_layers`` residual blocks x + silu(Wx + b) and an LM head, its own or the target's.
    ``draft_vocab_size``: ids that the LM heads know once they were trimmed; None: all.
    """

    hidden_size: int  # D
    vocab_size: int  # V, the target's
    num_heads: int  # M
    num_layers: int
    own_lm_head: bool
    method: Literal["medusa"] = "medusa"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, ("hidden_size", "vocab_size", "num_heads"))
        _check_flags(self, ("own_lm_head",))
        if not _is_integer(self.num_layers) or self.num_layers < 0:
            raise UserError(f"num_layers: expected a count of residual blocks, got {self.num_layers!r}")
        if self.method != "medusa":
            raise UserError(f"method: expected medusa, got {self.method!r}")
        if not self.num_layers and not self.own_lm_head:
            raise UserError("num_layers: heads without a residual block and without an LM head are the target's own")

    @property
    def reduced_vocab(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size is not None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping that :func:`heads_config_from_json` takes back unchanged. Trimmed heads have none."""
        assert not self.reduced_vocab
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "draft_vocab_size"}


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """One decoder layer over the target's features (dimension letters as in ``jaxspec.shapes``).

    ``eagle`` (EAGLE-1, also what EAGLE-2 drafts with) sees the target's hidden state after its final norm and uses the
    target's LM head. ``eagle3`` sees several levels of the target's residual stream and has a norm, an LM head and
    possibly a smaller vocabulary of its own.
    """

    method: Literal["eagle", "eagle3"]
    hidden_size: int  # D of the head
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # ids that the head's own LM head knows; V for eagle, fewer once it was trimmed
    fc_bias: bool
    own_embed: bool  # False: the target's token table
    norm_before_residual: bool = False  # eagle3: the residual starts from the normed features
    # eagle3: the head sees the residual stream *entering* these target layers, in this order; None: the authors' rule.
    aux_layers: tuple[int, ...] | None = None
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.method not in ("eagle", "eagle3"):
            raise UserError(f"method: expected eagle or eagle3, got {self.method!r}")
        _check_sizes(self, ("target_hidden_size", "draft_vocab_size"))
        _check_flags(self, ("fc_bias", "own_embed", "norm_before_residual"))
        for name in ("rms_norm_eps", "rope_theta"):
            if not isinstance(getattr(self, name), int | float):
                raise UserError(f"{name}: expected a number, got {getattr(self, name)!r}")
        _ = self.decoder  # checks the sizes of the layer
        if self.method == "eagle":
            self._check_eagle1()
        else:
            self._check_eagle3()

    def _check_eagle1(self) -> None:
        expected = {
            "target_hidden_size": self.hidden_size,
            "norm_before_residual": False,
            "aux_layers": None,
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise UserError(f"{name}: expected {value} for method eagle, got {getattr(self, name)!r}")
        self._check_vocab()

    def _check_eagle3(self) -> None:
        if self.fc_bias:
            raise UserError("fc_bias: expected false for method eagle3, got true")
        self._check_vocab()
        if self.target_hidden_size != self.hidden_size and not self.own_embed:
            raise UserError(
                f"own_embed: the target's embeddings are {self.target_hidden_size} wide, the head is "
                f"{self.hidden_size} wide: expected embeddings of its own"
            )
        if self.aux_layers is not None:
            layers = self.aux_layers
            fine = all(_is_integer(layer) and layer >= 0 for layer in layers)
            if not fine or not layers or list(layers) != sorted(set(layers)):
                raise UserError(f"aux_layers: expected distinct target layers in ascending order, got {list(layers)}")
        if self.features_size == self.hidden_size:
            raise UserError(
                f"target_hidden_size: {self.num_levels} levels of {self.target_hidden_size} are as wide as the head "
                f"({self.hidden_size}): its own outputs could not be told from the target's features"
            )

    def _check_vocab(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft_vocab_size: expected at most {self.vocab_size} (vocab_size), got {self.draft_vocab_size}"
            )

    @property
    def num_levels(self) -> int:
        """How many levels of the target's residual stream the head sees."""
        return EAGLE3_LEVELS if self.aux_layers is None else len(self.aux_layers)

    @property
    def features_size(self) -> int:
        """Width of what the target hands over per token."""
        return self.target_hidden_size * (self.num_levels if self.method == "eagle3" else 1)

    @property
    def reduced_vocab(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def decoder(self) -> LlamaConfig:
        """The head's layer as a decoder of one layer: its cache, rotary frequencies and parameter shapes."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=False,
            rope_scaling=self.rope_scaling,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain mapping that :func:`heads_config_from_json` takes back unchanged."""
        return dataclasses.asdict(self)


HeadsConfig = MedusaConfig | EagleConfig


def heads_config_from_json(data: Mapping[str, Any]) -> HeadsConfig:
    """Reads ``to_json``'s mapping by its ``method``. Unknown and missing keys raise UserError with their names."""
    method = data.get("method") if isinstance(data, Mapping) else None
    if method == "medusa":
        if "draft_vocab_size" in data:
            raise UserError("config: unknown key 'draft_vocab_size'")
        return MedusaConfig(**checked_fields(MedusaConfig, data, "config"))
    if method not in ("eagle", "eagle3"):
        raise UserError(f"config: method: expected medusa, eagle or eagle3, got {method!r}")
    values = checked_fields(EagleConfig, data, "config")
    if values.get("aux_layers") is not None:
        if not isinstance(values["aux_layers"], list | tuple):
            raise UserError(f"config: aux_layers: expected a list of layers, got {values['aux_layers']!r}")
        values["aux_layers"] = tuple(values["aux_layers"])
    if values.get("rope_scaling") is not None:
        scaling = checked_fields(RopeScaling, values["rope_scaling"], "config.rope_scaling")
        values["rope_scaling"] = RopeScaling(**{**scaling, "divisors": tuple(scaling.get("divisors", ()))})
    config = EagleConfig(**values)
    if config.method == "eagle" and config.reduced_vocab:
        raise UserError(
            f"draft_vocab_size: expected {config.vocab_size} for method eagle, got {config.draft_vocab_size}"
        )
    return config


def rule_layers(num_layers: int) -> tuple[int, ...]:
    """Where the authors' EAGLE-3 code taps a target of ``num_layers``: entering layers 2, n/2 and n-3, ascending.

    >>> rule_layers(32), rule_layers(5)
    ((2, 16, 29), (2,))
    """
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def resolved_aux_layers(config: EagleConfig, num_layers: int) -> tuple[int, ...]:
    """The target layers that an EAGLE-3 head sees on a target of ``num_layers``.

    Raises UserError when they are not all there, or when the authors' rule does not give three distinct ones.
    """
    if config.aux_layers is None:
        layers = rule_layers(num_layers)
        if len(layers) != EAGLE3_LEVELS or not 0 <= layers[0] <= layers[-1] < num_layers:
            raise UserError(
                f"layer ids: the head names none, and of a target with {num_layers} layers the rule 2, n/2, n-3 gives "
                f"2, {num_layers // 2}, {num_layers - 3}: expected {EAGLE3_LEVELS} distinct ones in 0..{num_layers - 1}"
            )
        return layers
    if config.aux_layers[-1] >= num_layers:
        raise UserError(
            f"layer ids: the head sees layers {list(config.aux_layers)}, the target has 0..{num_layers - 1}"
        )
    return config.aux_layers


def misfits(config: HeadsConfig, target: LlamaConfig) -> list[str]:
    """Why heads of this shape cannot sit on the target: one line each, with both values."""
    width = config.hidden_size if isinstance(config, MedusaConfig) else config.target_hidden_size
    lines = []
    if width != target.hidden_size:
        lines.append(f"hidden size: the head was made for {width}, the target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        lines.append(f"vocabulary: the head was made for {config.vocab_size} ids, the target has {target.vocab_size}")
    if isinstance(config, EagleConfig) and config.method == "eagle3":
        try:
            resolved_aux_layers(config, target.num_layers)
        except UserError as error:
            lines.append(str(error))
    return lines


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not _is_integer(value) or value < 1:
            raise UserError(f"{name}: expected a positive integer, got {value!r}")


def _check_flags(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise UserError(f"{name}: expected true or false, got {getattr(config, name)!r}")
