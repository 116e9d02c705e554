"""Text in, token ids out, and back: tokenizer, chat template, incremental detokenizer, stop strings.

The engine, the command line and the server share this package; nothing in it touches a device.
"""

from jaxspec.text.stream import Detokenizer, StopMatcher
from jaxspec.text.tokenizer import TOKENIZER_FILES, Tokenizer

__all__ = ["TOKENIZER_FILES", "Detokenizer", "StopMatcher", "Tokenizer"]
