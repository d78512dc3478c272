"""Run a function right after a module has been imported.

``import hf_memopt`` has to teach transformers new names, but must not import transformers for that: it takes seconds,
brings in whatever accelerators and quantisers are installed, and a program that only wants the optimizer or `hf-memopt
list` needs none of it. So each registration waits for the module it concerns. If that is loaded already it runs at
once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType

logger = logging.getLogger("hf_memopt")

Hook = Callable[[ModuleType], None]


def after_import(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` once module ``name`` is imported: now, if it is, else right after its code has run.

    An exception in the hook is logged as a warning and goes no further: it must not break the import of somebody
    else's module.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _run(hook, module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.hooks.setdefault(name, []).append(hook)


def _run(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:
        logger.warning(
            "hf_memopt: %s failed on %s: %s: %s", hook.__name__, module.__name__, type(error).__name__, error
        )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: asks the finders behind it and wraps the loader of a module that is waited for."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._asking = threading.local()

    def find_spec(self, name, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.hooks or getattr(self._asking, "name", None) == name:
            return None
        # another finder of this kind may ask all finders too, this one included
        self._asking.name = name
        try:
            spec = self._ask_the_others(name, path, target)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            self._wrap(spec, name)
        return spec

    def _ask_the_others(self, name, path, target) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec is not None and finder is not self else None
            if spec is not None:
                return spec
        return None

    def _wrap(self, spec: importlib.machinery.ModuleSpec, name: str) -> None:
        exec_module = spec.loader.exec_module

        def exec_then_call(module: ModuleType) -> None:
            exec_module(module)
            for hook in self.hooks.pop(name, []):
                _run(hook, module)

        # on the instance, so that inspect, pickle and resource readers see the original loader
        spec.loader.exec_module = exec_then_call
