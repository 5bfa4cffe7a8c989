"""``python -m memsaver``: the same as the command ``memsaver``."""

import sys

from memsaver.cli import main

if __name__ == "__main__":
    sys.exit(main())
