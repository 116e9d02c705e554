"""``python -m serve`` is ``jaxspec-serve``."""

import sys

from serve.cli import main

sys.exit(main())
