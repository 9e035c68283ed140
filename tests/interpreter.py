"""Makes Triton's interpreter faster in the tests, with the same results.

The interpreter patches `triton.language` at each kernel launch, and again at each function call in the
kernel. The patches at function calls change nothing and take up to half the time. The interpreter also builds
a table of all dtypes for each operation. This module removes the repeated work.
"""

from functools import cache
from types import FunctionType


def accelerate() -> None:
    """Patch the interpreter in this process. A second call has no effect."""
    from triton.runtime import interpreter

    if interpreter._patch_lang.__module__ != __name__:
        _patch_language_once_per_launch(interpreter)
        _look_up_dtypes(interpreter)


def _look_up_dtypes(interpreter) -> None:
    whole = interpreter._get_np_dtype
    cached = cache(whole)
    interpreter._get_np_dtype = lambda each: (cached if type(each) is interpreter.tl.dtype else whole)(each)


def _patch_language_once_per_launch(interpreter) -> None:
    language = interpreter.tl
    whole, scopes = interpreter._patch_lang, interpreter._LangPatchScope
    done = set()

    class Launch(scopes):
        """Restores `triton.language` when a launch ends."""

        def restore(self) -> None:
            super().restore()
            done.discard(language)

    def patch_new(fn: FunctionType):
        # Kernels use `language`. Functions in Triton's library use `language.core`, which the interpreter
        # never restores.
        wanted = {each for each in fn.__globals__.values() if each is language or each is language.core}
        if wanted <= done:
            return scopes()
        done.update(wanted)
        launch = Launch()
        launch._changes = whole(fn)._changes
        return launch

    interpreter._patch_lang = patch_new
