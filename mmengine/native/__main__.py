"""Compiles the CPU kernels (`python -m mmengine.native`), so that the first request need not wait for the
compiler.
"""

from mmengine.native.library import describe, load

if __name__ == "__main__":
    load()
    print(f"CPU kernels: {describe()}")
