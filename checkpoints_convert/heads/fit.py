"""Heads for a target: whether they fit, and which of its layers they see."""

import dataclasses

from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.plan import Heads
from jaxspec.checkpoint import Checkpoint, heads_misfits
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import EagleConfig, resolved_aux_layers


def fitted(heads: Heads, target: Checkpoint[LlamaConfig], findings: Findings) -> Heads:
    """The heads, told which layers of the target they see. Every way in which they do not fit is a finding."""
    lines = heads_misfits(heads.config, heads.manifest, target)
    for line in lines:
        findings.add(f"--target {target.path}: {line}")
    config = heads.config
    if lines or not isinstance(config, EagleConfig) or config.method != "eagle3":
        return heads
    layers = resolved_aux_layers(config, target.config.num_layers)
    return dataclasses.replace(heads, config=dataclasses.replace(config, aux_layers=layers))
