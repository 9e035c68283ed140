"""Run the command `mmengine` with the planted bug.

python examples/debugging/buggy.py log verify night.log
"""

import planted  # noqa: F401 - importing it plants the bug

from mmengine.cli.main import main

if __name__ == "__main__":
    main()
