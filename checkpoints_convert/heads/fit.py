"""Do heads belong to a target? Shapes, layers, and the tokenizer that each was recorded with."""

import dataclasses

from checkpoints_convert.findings import Findings
from checkpoints_convert.heads.plan import Heads
from jaxspec.checkpoint import Checkpoint
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import EagleConfig, misfits, resolved_aux_layers


def fitted(heads: Heads, target: Checkpoint[LlamaConfig], findings: Findings) -> Heads:
    """The heads, told which layers of the target they see. Every way in which they do not fit is a finding."""
    lines = misfits(heads.config, target.config)
    recorded = heads.manifest
    if recorded is not None and recorded.tokenizer_fingerprint is not None:
        ours, theirs = recorded, target.manifest
        if ours.tokenizer_fingerprint != theirs.tokenizer_fingerprint:
            lines.append(
                f"tokenizer: the heads were recorded with fingerprint {ours.tokenizer_fingerprint}, the target has "
                f"{theirs.tokenizer_fingerprint}"
            )
        if (ours.family, ours.model_version) != (theirs.family, theirs.model_version):
            lines.append(
                f"family: the heads were recorded with {ours.family} {ours.model_version}, the target is "
                f"{theirs.family} {theirs.model_version}"
            )
    for line in lines:
        findings.add(f"--target {target.path}: {line}")
    config = heads.config
    if lines or not isinstance(config, EagleConfig) or config.method != "eagle3":
        return heads
    layers = resolved_aux_layers(config, target.config.num_layers)
    return dataclasses.replace(heads, config=dataclasses.replace(config, aux_layers=layers))
