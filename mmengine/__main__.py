"""`python -m mmengine` is the command `mmengine`."""

from mmengine.cli.main import main

if __name__ == "__main__":
    main()
