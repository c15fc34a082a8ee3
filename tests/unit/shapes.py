"""The run-time checker of the unit tests: tensors' shapes and dtypes, for calls that are meant to be right.

Only annotations that name an array are checked; numbers and names have checks of their own in the
package. Tests of bad input (`test_bad_...`) turn the checker off, to meet the package's own errors.

A checker is compiled when its function is first called: most functions are not called by most workers.
A function inside another is defined again at every call of that one; its checker is compiled once.
"""

import functools
import inspect

from beartype import beartype

enabled = True
_compiled = {}


def check(function):
    """A type checker for `jaxtyping.install_import_hook`, which hands it stand-ins that only bind arguments."""
    annotations = getattr(function, "__annotations__", {})
    arrays = {name: a for name, a in annotations.items() if any(t in str(a) for t in ("Tensor", "ndarray"))}
    if not arrays:
        return function

    @functools.cache
    def checked():
        key = function.__module__, function.__qualname__, str(inspect.signature(function))
        if key not in _compiled:
            function.__annotations__ = arrays
            _compiled[key] = beartype(function)
            function.__annotations__ = annotations
        return _compiled[key]

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (checked() if enabled else function)(*args, **kwargs)

    return call
