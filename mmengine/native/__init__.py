"""CPU kernels in C++, compiled once on the machine that runs them and called through ctypes."""
