"""Speculative decoding as a `custom_generate` method of transformers; the library behind it is specdec."""

try:
    from specdec.engine.hub import generate
except ImportError as error:
    raise ImportError(
        "this decoding method is a part of specdec, which is not installed here, or is the package of another project "
        f"with the same name: see the README in the same folder for how to install it ({error})"
    ) from error

__all__ = ["generate"]
