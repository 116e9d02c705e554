"""Do heads belong to a target? Shapes, layers, and the tokenizer that they were recorded with."""

from jaxspec.checkpoint.folder import Checkpoint
from jaxspec.checkpoint.manifest import Manifest
from jaxspec.model.config import LlamaConfig
from jaxspec.model.heads.config import HeadsConfig, misfits


def heads_misfits(config: HeadsConfig, recorded: Manifest | None, target: Checkpoint[LlamaConfig]) -> list[str]:
    """Why heads cannot sit on the target: one line each, with both values.

    ``recorded``: the heads' manifest. Heads that were converted without a target know no tokenizer and no family.
    """
    lines = misfits(config, target.config)
    if recorded is None or recorded.tokenizer_fingerprint is None:
        return lines
    theirs = target.manifest
    if recorded.tokenizer_fingerprint != theirs.tokenizer_fingerprint:
        lines.append(
            f"tokenizer: the heads were recorded with fingerprint {recorded.tokenizer_fingerprint}, the target has "
            f"{theirs.tokenizer_fingerprint}"
        )
    if (recorded.family, recorded.model_version) != (theirs.family, theirs.model_version):
        lines.append(
            f"family: the heads were recorded with {recorded.family} {recorded.model_version}, the target is "
            f"{theirs.family} {theirs.model_version}"
        )
    return lines
