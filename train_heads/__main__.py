import sys

from train_heads.cli import main

sys.exit(main())
