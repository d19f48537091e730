"""`@jit` and `@gluon_jit`: triton's decorators, untyped on purpose (the body of a kernel is not Python to a type checker)."""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.runtime import interpreter

jit: Any = triton.jit
gluon_jit: Any = gluon.jit

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns a loop bound into an int in a way that numpy 2.4 no longer allows."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index
