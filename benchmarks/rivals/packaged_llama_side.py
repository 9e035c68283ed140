"""Runs llama.cpp's npm package for the comparison: python packaged_llama_side.py FILE THREADS LIBRARIES."""

import sys
from pathlib import Path

from packaged_llama import PackagedLlama
from side import MAX_ROWS, MAX_TOKENS, serve

if __name__ == "__main__":
    file, threads, libraries = sys.argv[1:]
    serve(PackagedLlama(Path(libraries), Path(file), int(threads), MAX_ROWS, MAX_TOKENS))
