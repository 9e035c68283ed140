"""Run the command `mmengine` with one of the bugs in this folder.

python examples/debugging/bugs/buggy.py victim log verify night.log
"""

import sys
from importlib import import_module

from mmengine.cli.main import main

if __name__ == "__main__":
    import_module(sys.argv.pop(1))  # the import installs the bug
    main()
