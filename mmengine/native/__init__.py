"""Kernels in C++ for a CPU: compiled on the machine that runs them, once, and called through ctypes."""
