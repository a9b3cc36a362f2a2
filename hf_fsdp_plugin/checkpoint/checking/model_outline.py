"""Names and shapes of the tensors of a config's model, without importing torch: 0.1 s instead of several seconds.

Transformers' own code for the config and the model runs, with substitutes for ``torch`` and for everything else that it
imports. The substitutes of torch's modules have parameters with shapes and without values. What has no substitute is an
:class:`_Unknown`, and an outline that depends on one raises an error: its truth value, its length, its use as a base
class, or a module that contains it. So an outline is complete, or there is none. It never names the reason: the caller
builds the model with torch then.

The substitutes replace modules of the process, so it has one of its own:
``python -m hf_fsdp_plugin.checkpoint.checking.model_outline CONFIG_FOLDER`` prints a JSON object.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Final, NoReturn


class NoOutlineError(Exception):
    """The model contains something that has no substitute."""


def model_outline(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the ``state_dict`` of the model that the ``config.json`` of a folder names.

    Raises:
        Exception: of any type, if the names and shapes cannot be found without torch.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    config = auto.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    name = config.architectures[0]
    if name not in module.__all__ or hasattr(config, "quantization_config"):
        raise NoOutlineError(name)
    model = getattr(module, name)(config)
    shapes = dict(model.named_tensors())
    for prefix, part in model.named_modules():
        for tied, kept in (getattr(part, "_tied_weights_keys", None) or {}).items():
            pattern = re.compile(f"{re.escape(prefix)}({tied}|{kept})")
            if len({shape for tensor, shape in shapes.items() if pattern.match(tensor)}) > 1:
                raise NoOutlineError(tied)  # the model may have another shape after it was tied
    return shapes


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NoOutlineError


class _Unknown:
    """Any object of a library: a function, a class, or an instance. It may be a module with parameters."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return type(self)()

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return () if self._name == "GenerationMixin" else (_NotBuilt,)  # it has no parameters and no constructor

    __or__ = __ror__ = __getitem__ = __call__  # of annotations
    __bool__ = __iter__ = __len__ = __index__ = __int__ = __float__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


class _NotBuilt:
    """The base of classes whose own base class is unknown, such as outputs of models. They have no instances."""

    __init__ = _refuse


class _Value(_Unknown):
    """A function or a result of torch that is not a module: a tensor, a number, or a dtype."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Tensor()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __call__
    __pow__ = __rpow__ = __neg__ = __floordiv__ = __mod__ = __matmul__ = __invert__ = __and__ = __call__
    __getitem__ = __setitem__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __call__
    __hash__ = object.__hash__


class _Tensor(_Value):
    """A tensor. ``known`` is its shape, or ``None`` if it depends on an operation without a substitute."""

    def __init__(self, known: tuple[int, ...] | None = None) -> None:
        vars(self).update(_name="", known=known)

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return _known_shape(self)
        if name == "device":
            return types.SimpleNamespace(type="meta")
        if name in _SAME_SHAPE or (name.endswith("_") and not name.startswith("_")):  # such as uniform_
            return lambda *_, **__: self
        return super().__getattr__(name) if name.startswith("__") else _Value(name)

    def _with(self, other: object) -> _Tensor:
        return _Tensor(self.known if isinstance(other, int | float) else None)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _with


_SAME_SHAPE: Final = ("clone", "contiguous", "detach", "float", "to")


def _known_shape(tensor: Any) -> tuple[int, ...]:
    if tensor.known is None:
        raise NoOutlineError
    return tuple(tensor.known)


def _sized(*sizes: Any, **_: Any) -> _Tensor:
    """Return the tensor of ``torch.zeros(2, 3)`` or ``torch.zeros((2, 3))``."""
    shape = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    return _Tensor(shape if all(isinstance(size, int) for size in shape) else None)


class _Parameter(_Tensor):
    def __init__(self, data: Any, requires_grad: bool = True) -> None:
        super().__init__(_known_shape(data))


class _Buffer(_Tensor):
    def __init__(self, data: Any, persistent: bool = True) -> None:
        super().__init__(data.known)
        vars(self)["persistent"] = persistent


class _Module:
    """``torch.nn.Module``: its attributes are its parameters, buffers and modules."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, _Unknown) and not isinstance(value, _Value):
            raise NoOutlineError(name)
        before = vars(self).get(name)
        if isinstance(before, _Buffer) and isinstance(value, _Value):
            value = _Buffer(value, before.persistent)
        vars(self)[name] = value

    def register_parameter(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    add_module = register_module = register_parameter

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        setattr(self, name, None if tensor is None else _Buffer(tensor, persistent))

    def to(self, *_: Any, **__: Any) -> _Module:
        return self

    eval = train = requires_grad_ = to

    def children(self) -> list[_Module]:
        return [value for value in vars(self).values() if isinstance(value, _Module)]

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, _Module]]:
        """Yield the prefix of the names of each module's tensors, and the module."""
        yield prefix, self
        for name, value in vars(self).items():
            if isinstance(value, _Module):
                yield from value.named_modules(f"{prefix}{name}.")

    def named_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, _Parameter) or (isinstance(value, _Buffer) and value.persistent):
                    yield prefix + name, _known_shape(value)

    def _set_weights(self, weight: Sequence[int], bias: bool = True) -> None:
        self.weight = _Parameter(_sized(weight))
        self.bias = _Parameter(_sized(weight[:1])) if bias else None


def _check_options(options: dict[str, Any]) -> None:
    """Refuse what may change the parameters: all other options than these."""
    if options.keys() - {"device", "dtype", "_freeze", "stride", "padding", "dilation", "padding_mode"}:
        raise NoOutlineError


class _Linear(_Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        _check_options(options)
        self.in_features, self.out_features = in_features, out_features
        self._set_weights((out_features, in_features), bias)


class _Embedding(_Module):
    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: Any = None, **options: Any) -> None:
        _check_options(options)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._set_weights((num_embeddings, embedding_dim), bias=False)


class _LayerNorm(_Module):
    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if elementwise_affine:
            self.weight = _Parameter(_sized(shape))
        if elementwise_affine and bias:
            self.bias = _Parameter(_sized(shape))


class _Conv(_Module):
    num_dims: int

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Any, *others: Any, **options: Any) -> None:
        groups, bias = options.pop("groups", 1), options.pop("bias", True)
        _check_options(options)
        if others[3:]:  # after stride, padding and dilation, which do not change the parameters
            raise NoOutlineError
        self.kernel_size = (kernel_size,) * self.num_dims if isinstance(kernel_size, int) else tuple(kernel_size)
        self._set_weights((out_channels, in_channels // groups, *self.kernel_size), bias)


class _MultiheadAttention(_Module):
    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, *, batch_first: bool = False) -> None:
        self.in_proj_weight = _Parameter(_sized(3 * embed_dim, embed_dim))
        self.in_proj_bias = _Parameter(_sized(3 * embed_dim))
        self.out_proj = _Linear(embed_dim, embed_dim)


class _ModuleList(_Module):
    def __init__(self, modules: Any = ()) -> None:
        for module in modules:
            self.append(module)

    extend = __init__

    def append(self, module: Any) -> _ModuleList:
        setattr(self, str(len(self)), module)
        return self

    def __len__(self) -> int:
        return len(self.children())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.children())

    def __getitem__(self, key: Any) -> Any:
        return self.children()[key]


class _Sequential(_ModuleList):
    def __init__(self, *modules: Any) -> None:
        super().__init__(modules)


class _PreTrainedModel(_Module):
    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        self.config = config

    def post_init(self) -> None:
        pass

    @classmethod
    def _from_config(cls, config: Any, **_: Any) -> _PreTrainedModel:
        return cls(config)


def _decorator(*args: Any, **_: Any) -> Any:
    """``@name`` or ``@name(…)`` of a class or function, which keeps its parameters."""
    return args[0] if args and isinstance(args[0], type) else lambda found: found


def _copy_function(function: Any) -> Callable[..., Any]:
    code, name = function.__code__, function.__name__
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


_NO_PARAMETERS: Final = (
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AvgPool1d AvgPool2d BCEWithLogitsLoss CrossEntropyLoss Dropout Dropout2d ELU "
    "Flatten GELU Hardswish Identity LeakyReLU MSELoss MaxPool1d MaxPool2d Mish ReLU ReLU6 SiLU Sigmoid Softmax "
    "Softplus Tanh Upsample ZeroPad2d"
)
_TORCH_NN: Final[dict[str, Any]] = {
    **dict.fromkeys(("functional", "init"), _Value()),
    "Module": _Module,
    "Parameter": _Parameter,
    "Buffer": _Buffer,
    "Linear": _Linear,
    "Embedding": _Embedding,
    "LayerNorm": _LayerNorm,
    "MultiheadAttention": _MultiheadAttention,
    "ModuleList": _ModuleList,
    "Sequential": _Sequential,
    **{f"Conv{num}d": type(f"Conv{num}d", (_Conv,), {"num_dims": num}) for num in (1, 2, 3)},
    **dict.fromkeys(_NO_PARAMETERS.split(), _Module),
}
_TORCH: Final[dict[str, Any]] = {
    "Tensor": _Tensor,
    "full": lambda size, *_, **__: _sized(size),
    "tensor": lambda value, **_: _Tensor(() if isinstance(value, int | float) else None),
    "log": lambda tensor: _Tensor(getattr(tensor, "known", None)),
    **dict.fromkeys(("empty", "ones", "rand", "randn", "zeros"), _sized),
}
_TRANSFORMERS: Final[dict[str, Any]] = {
    "__version__": "",
    "CONFIG_NAME": "config.json",
    "PreTrainedModel": _PreTrainedModel,
    "PushToHubMixin": type("PushToHubMixin", (), {"push_to_hub": lambda *_: None}),
    "cached_file": lambda folder, file, **_: str(Path(folder, file)),
    "copy_func": _copy_function,
    "is_timm_config_dict": lambda _: False,
    "is_torch_available": lambda: True,
    "auto_docstring": _decorator,
    "use_experts_implementation": _decorator,
    "use_kernel_forward_from_hub": _decorator,
    "use_kernel_func_from_hub_with_fallback": _decorator,
    "use_kernelized_func": _decorator,
}
_REAL: Final = re.compile(
    r"transformers\.(activations|backbone_utils|configuration_utils|generation\.configuration_utils|modeling_layers"
    r"|modeling_rope_utils|pytorch_utils|utils\.type_validators"
    r"|integrations\.heterogeneity(\.configuration_utils)?|models\.(\w+\.)+(configuration|modeling|generation)_\w+"
    r"|models\.auto\.(auto_factory|auto_mappings))"
    r"|packaging(\.\w+)*|typing_extensions|huggingface_hub\.(dataclasses|errors)"
)
"""The modules that run. All others outside of the standard library are substitutes."""


class _Substitute(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _TRANSFORMERS:
            raise AttributeError(name)
        if self.__name__ == "torch.nn":
            return _TORCH_NN[name] if name in _TORCH_NN else _Unknown(name)
        if self.__name__.startswith("torch."):
            return (_Value if self.__name__ in ("torch.nn.functional", "torch.nn.init") else _Unknown)(name)
        if self.__name__ == "torch":
            return importlib.import_module("torch.nn") if name == "nn" else _TORCH.get(name, _Value(name))
        if name in _TRANSFORMERS:
            return _TRANSFORMERS[name]
        if name.startswith("is_") and name.endswith("_available"):
            return lambda *_, **__: False
        if re.fullmatch(r"transformers\.models\.\w+", self.__name__):
            for path in sorted(Path(self.__path__[0]).glob("*_*.py")):
                module = f"{self.__name__}.{path.stem}"
                if _REAL.fullmatch(module) and name in getattr(importlib.import_module(module), "__all__", ()):
                    return getattr(sys.modules[module], name)
        return _Unknown(name)


class _Finder(MetaPathFinder, Loader):
    """Finds substitutes of modules. A library that is not installed is not found, except torch."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in sys.stdlib_module_names or _REAL.fullmatch(fullname):
            return None
        real = PathFinder.find_spec(fullname, path) if fullname == top or path else None
        if real is None and top != "torch" and fullname == top:
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        if real is not None and top in ("transformers", "huggingface_hub"):
            spec.submodule_search_locations = list(real.submodule_search_locations or [])
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Substitute(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # libraries may print other lines
        outline = model_outline(Path(sys.argv[1]))
    print(json.dumps(outline))
