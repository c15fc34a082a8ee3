"""The run-time checker of the unit tests: tensors' shapes and dtypes, for calls that are meant to be right.

Only annotations that name an array are checked; numbers and names have checks of their own in the
package. Tests of bad input (`test_bad_...`) turn the checker off, to meet the package's own errors.
"""

import functools

from beartype import beartype

enabled = True


def check(function):
    """A type checker for `jaxtyping.install_import_hook`."""
    annotations = getattr(function, "__annotations__", {})
    arrays = {name: a for name, a in annotations.items() if any(t in str(a) for t in ("Tensor", "ndarray"))}
    if not arrays:
        return function
    function.__annotations__ = arrays
    checked = beartype(function)
    function.__annotations__ = annotations

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (checked if enabled else function)(*args, **kwargs)

    return call
