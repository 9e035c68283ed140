"""Runs the command `mmengine` for `python -m mmengine`."""

from mmengine.cli.main import main

if __name__ == "__main__":
    main()
