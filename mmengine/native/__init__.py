"""CPU kernels in C++, called through ctypes. A wheel may contain the compiled kernels. Otherwise they are
compiled once on the machine that runs them.
"""
