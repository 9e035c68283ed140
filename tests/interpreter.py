"""Makes Triton's interpreter faster in the tests. Kernels compute the same values.

The interpreter replaces the functions of `triton.language` at each launch of a kernel, and again at each call
of a function inside the kernel. The second replacement changes nothing, and takes up to half of the time. The
interpreter also builds a table of all dtypes for each operation.
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
        """The changes of a launch, which end with the launch."""

        def restore(self) -> None:
            super().restore()
            done.discard(language)

    def patch_new(fn: FunctionType):
        # A launch comes first, and its kernel uses `language`. The functions of Triton's library use
        # `language.core`, whose changes the interpreter never restores.
        wanted = {each for each in fn.__globals__.values() if each is language or each is language.core}
        if wanted <= done:
            return scopes()
        done.update(wanted)
        launch = Launch()
        launch._changes = whole(fn)._changes
        return launch

    interpreter._patch_lang = patch_new
