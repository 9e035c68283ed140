"""`python -m mmengine.native`: compile the kernels now, so that no first request waits for it."""

from mmengine.native.library import describe, load

if __name__ == "__main__":
    load()
    print(f"CPU kernels: {describe()}")
