"""``python -m checkpoints_convert``: the same as ``jaxspec-convert``."""

import sys

from checkpoints_convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
