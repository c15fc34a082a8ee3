"""A device to test with where there is none: torch's `meta`, but with numbers, and no mixing.

While `Elsewhere()` is entered, a tensor that is made on `meta` or moved there says that it lies there, and keeps its
numbers out of sight. An operation that it shares with a tensor of the CPU is refused, as CUDA refuses it. Allowed are
copies, a number without dimensions among the inputs of a pointwise operation, and indices that lie on the CPU.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
COPIES = {"aten::copy_", "aten::_foreach_copy_"}
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# these take a number of the CPU as well
TAKE_NUMBERS = {"aten::fill", "aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::floor_divide"}
MAKERS = {torch.tensor, torch.as_tensor, torch.asarray}  # C++ fills what they give before a mode is asked


class MixedDevices(RuntimeError):
    """Tensors of two devices in one operation, or a generator of the CPU that is to draw elsewhere."""


class There(Tensor):
    """A tensor that lies elsewhere."""

    hidden: Tensor
    made = 0  # how many there have been
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, hidden: Tensor):
        layout = dict(strides=hidden.stride(), storage_offset=hidden.storage_offset())
        self = Tensor._make_wrapper_subclass(cls, hidden.shape, dtype=hidden.dtype, device=DEVICE, **layout)
        self.hidden = hidden
        cls.made += 1
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError("can't convert a tensor of this device to numpy. Use Tensor.cpu() first")

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"There({self.hidden!r})"


class Elsewhere(TorchDispatchMode):
    """The mode in which `meta` is a device with numbers."""

    def __enter__(self):
        self.makers = _Makers()
        self.makers.__enter__()
        # a module that is converted gets new parameters: what is put into old ones leaves their hidden numbers behind
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        self.makers.__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})


class _Makers(TorchFunctionMode):
    """What is made elsewhere of Python's or numpy's numbers is made on the CPU, and moved."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _indices(args[1]), *args[2:])
        if func is Tensor.new_tensor:
            like, *args = args
            func, kwargs = torch.tensor, {"dtype": like.dtype, "device": like.device, **kwargs}
        if func in MAKERS and _is_there(kwargs.get("device")) and not isinstance(args[0], There):
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def _indices(at):
    """With tensors of the CPU for lists, of which C++ would make some that have no numbers here."""
    if isinstance(at, tuple):
        return tuple(map(_indices, at))
    return torch.tensor([*at], dtype=None if len(at) else torch.int64) if isinstance(at, list | range) else at


def _is_there(device) -> bool:
    return device is not None and torch.device(device) == DEVICE


def call(func, args, kwargs):
    """An operation on the hidden numbers; what comes of it lies where its inputs lie, or where it says."""
    if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
        return call(func, (args[0].double(), *args[1:]), kwargs)  # as CUDA does; the CPU counts no integers
    tensors = [*_of(Tensor, args), *_of(Tensor, kwargs.values())]
    hiding = [t for t in tensors if isinstance(t, There)]
    if hiding and len(hiding) < len(tensors):
        refuse_mixture(func, args, kwargs)
    there, device = bool(hiding), kwargs.get("device")
    if device is not None:  # a copy, or a tensor that is made anew
        there = _is_there(device)
        kwargs = {**kwargs, "device": torch.device("cpu")} if there else kwargs
    if not there and not hiding:
        return func(*args, **kwargs)
    if there and any(_of(torch.Generator, [*args, *kwargs.values()])):
        raise MixedDevices(f"{func}: the generator is of the CPU")
    made = func(*_mapped(_hidden, args), **{name: _mapped(_hidden, value) for name, value in kwargs.items()})
    for t in hiding:
        if t.shape != t.hidden.shape:  # changed in place, as at the end of `vector @ matrix`
            with torch._C._DisableTorchDispatch():
                t.as_strided_(t.hidden.shape, t.hidden.stride(), t.hidden.storage_offset())
    known = {id(t.hidden): t for t in hiding}  # what an operation in place gives back
    return _mapped(lambda t: known[id(t)] if id(t) in known else There(_plain(t)), made) if there else made


def _of(kind: type, values):
    """Those of a kind, in lists as well."""
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, list | tuple):
            yield from _of(kind, value)


def _mapped(change, value):
    """Tensors changed, in lists as well."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, v) for v in value)
    return change(value) if isinstance(value, Tensor) else value


def _hidden(t: Tensor) -> Tensor:
    assert isinstance(t, There) or t.device != DEVICE, "made before the mode was entered, or past it: no numbers"
    return t.hidden if isinstance(t, There) else t


def _plain(t: Tensor) -> Tensor:
    """With its numbers in memory: what is lazily zero, negative or conjugate is not seen through a `There`."""
    return torch.zeros_like(t) if t._is_zerotensor() else t.resolve_neg().resolve_conj()


def refuse_mixture(func, args, kwargs) -> None:
    """Raise unless each tensor lies elsewhere or may stay on the CPU."""
    name = func._schema.name
    if name in COPIES:
        return
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        for t in _of(Tensor, [given]):
            if not isinstance(t, There) and not _may_stay(func, name, argument, t, args[0]):
                raise MixedDevices(f"{func}: {argument.name} lies on the CPU, another tensor does not")


def _may_stay(func, name: str, argument, t: Tensor, first) -> bool:
    """Whether an operation takes a tensor of the CPU beside others elsewhere."""
    if name in INDEXING and argument.name == "indices":
        return isinstance(first, There)
    if t.dim() or (argument.alias_info is not None and argument.alias_info.is_write):
        return False
    return torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS or (name in INDEXING and argument.name == "values")
