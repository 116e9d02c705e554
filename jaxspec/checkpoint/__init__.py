"""The checkpoint folder: what is in it, how it is opened, restored and written.

=====================  =========================================================================================
manifest.json          :class:`Manifest`; written last, so a folder without it is no checkpoint
config.json            :class:`jaxspec.model.config.LlamaConfig`, or a ``jaxspec.model.heads.config.HeadsConfig``
params/<group>/        one Orbax item per layer, and one each for ``embed``, ``final_norm`` and ``lm_head``
tokenizer/             tokenizer.json and its companions; absent when the source had none
=====================  =========================================================================================
"""

from jaxspec.checkpoint.fit import heads_misfits
from jaxspec.checkpoint.folder import Checkpoint, open_any, open_checkpoint, open_heads
from jaxspec.checkpoint.manifest import Manifest, QuantizationError, TensorRecord, tensor_sha256
from jaxspec.checkpoint.restore import read_group, read_stored, restore_params
from jaxspec.checkpoint.writer import CheckpointWriter, check_destination

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Manifest",
    "QuantizationError",
    "TensorRecord",
    "check_destination",
    "heads_misfits",
    "open_any",
    "open_checkpoint",
    "open_heads",
    "read_group",
    "read_stored",
    "restore_params",
    "tensor_sha256",
]
