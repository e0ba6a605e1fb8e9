"""Names of torchvision that SGLang's image processors import. A text model never calls them."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
_MODES = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "NEAREST_EXACT")


class _Namespace(ModuleType):
    """A module in which every capitalised name is a class with the interpolation modes as attributes."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        made = type(name, (), {mode: number for number, mode in enumerate(_MODES)})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Any `torchvision.x.y` is such a module."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("torchvision.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Namespace(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
