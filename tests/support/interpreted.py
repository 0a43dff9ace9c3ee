"""Triton's interpreter, which runs kernels on the CPU: `TRITON_INTERPRET=1` before Triton is imported."""

import importlib.util

MISSING = importlib.util.find_spec("triton") is None


def mend() -> None:
    """Let Triton 3.6 count loops with numpy 2.4, which makes no integer of an array with a dimension."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
