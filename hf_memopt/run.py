"""Run a training script that knows nothing of this package, with its optimizer names registered.

    python -m hf_memopt.run train.py --optim taco_adamw --output_dir out
    python -m hf_memopt.run -m package.module --optim taco_adamw
    accelerate launch -m hf_memopt.run train.py --optim taco_adamw
    torchrun --nproc-per-node 2 -m hf_memopt.run train.py --optim taco_adamw

The script sees what it would see under ``python train.py``: ``__name__``, ``sys.argv``, ``sys.path`` and, for worker
processes that import it again, ``__main__``.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
import zipfile

from .cli import quiet_when_nobody_reads

USAGE = "usage: python -m hf_memopt.run script.py [arguments]\n       python -m hf_memopt.run -m module [arguments]"


def main(argv: list[str] | None = None) -> int:
    """Import hf_memopt, then run the script or module named in ``argv`` (``sys.argv[1:]``) with the rest of it."""
    import hf_memopt  # noqa: F401  (registers the names)

    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in ("-h", "--help"):
        with quiet_when_nobody_reads("hf_memopt.run"):
            print(f"{__doc__.strip()}\n\n{USAGE}")
        return 0
    as_module = bool(argv) and argv[0] == "-m"
    target = argv[1:2] if as_module else argv[:1]
    if not target or (not as_module and target[0].startswith("-")):
        print(USAGE, file=sys.stderr)
        return 2
    if as_module:
        problem = _why_not_runnable(target[0])
        if problem:
            print(f"hf_memopt.run: {problem}.", file=sys.stderr)
            return 1
        sys.argv = argv[1:]
        # sys.path[0] is the working directory already, as under `python -m`
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        return 0
    if not os.path.exists(target[0]):
        print(f"hf_memopt.run: there is no file {target[0]!r}.", file=sys.stderr)
        return 2
    sys.argv = argv
    if os.path.isfile(target[0]) and not zipfile.is_zipfile(target[0]):
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(target[0]))
        _run_file(target[0])
    elif importlib.machinery.PathFinder.find_spec("__main__", [target[0]]) is None:
        print(f"hf_memopt.run: there is no __main__.py in {target[0]!r}.", file=sys.stderr)
        return 1
    else:
        runpy.run_path(target[0], run_name="__main__")  # a folder or archive: goes onto sys.path itself
    return 0


def _why_not_runnable(module: str) -> str | None:
    """Why ``python -m module`` has nothing to run; None if it has. Errors in the code of its packages are raised."""
    try:
        spec = importlib.util.find_spec(module) if not module.startswith(".") else None
    except ImportError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # no name, or a module without a specification
        spec = None
    if spec is None:
        script = f"; a script is run without -m: python -m hf_memopt.run {module}" if os.path.isfile(module) else ""
        return f"No module named {module!r}{script}"
    if spec.submodule_search_locations is None:
        return None
    if module.endswith(".__main__") or _why_not_runnable(f"{module}.__main__"):
        return f"No module named {module + '.__main__'!r}; {module!r} is a package and cannot be run itself"
    return None


def _run_file(path: str) -> None:
    """As ``python path`` does. Not ``runpy.run_path``, which leaves ``__file__`` relative."""
    loader = importlib.machinery.SourceFileLoader("__main__", os.path.abspath(path))
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=loader.path, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = main_module
    exec(loader.source_to_code(loader.get_data(loader.path), loader.path), main_module.__dict__)


if __name__ == "__main__":
    sys.exit(main())
