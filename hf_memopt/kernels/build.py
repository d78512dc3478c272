"""Building the CPU kernel with the system's compiler, and keeping it in the user's own cache.

Executing a file from a cache folder means trusting whoever could have written it. So a library is loaded only when
its folder, the folder above it that belongs to the package, and the file itself are owned by this user, are no
symbolic links and are writable by nobody else. Otherwise, and where the folder cannot be written, the library is
built into a fresh private folder for this process, and one line of the log says so.

A library's name holds two hashes: one of everything that decides its content (sources, compiler and its version,
flags, processor), one of the content itself. Hence a truncated file is recognised before it is loaded (loading it
could kill the process) and built again; and processes that build at the same time do not disturb each other, since
each writes under a name of its own and then renames.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_SOURCE = "ternary_adamw.c"
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=off",  # README.md: no fused multiply-add where the equations have two roundings
    "-fno-math-errno",
    "-fno-trapping-math",
)
_NATIVE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_TIMEOUT = 300  # seconds
_logger = logging.getLogger("hf_memopt")


class BuildError(RuntimeError):
    """Why there is no library; one clause, to stand inside a sentence."""


def load() -> ctypes.CDLL:
    """The kernel's library, from the cache or freshly built.

    Raises:
        BuildError: there is no working compiler.
    """
    if os.name != "posix":
        raise BuildError("it is built for POSIX systems only")
    compiler = find_compiler()
    key = _key(compiler)
    try:
        folder = cache_folder()
    except OSError as error:
        return _load_privately(compiler, key, str(error))
    for path in sorted(folder.glob(f"{key}-*.so")):
        if not _is_private(path, stat.S_ISREG):
            return _load_privately(compiler, key, f"{path} is not this user's alone")
        if _is_whole(path):
            return _open(path)
    try:
        path = _build(compiler, key, folder)
    except OSError as error:
        return _load_privately(compiler, key, str(error))
    return _open(path)


def find_compiler() -> list[str]:
    """The command of the C compiler: the environment variable CC, else cc, gcc or clang."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"the environment variable CC={os.environ['CC']!r} is not a command: {error}") from None
    if named:
        if shutil.which(named[0]) is None:
            raise BuildError(f"the C compiler {named[0]!r} named by the environment variable CC was not found")
        return [shutil.which(named[0]), *named[1:]]
    for name in _COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError(f"no C compiler was found: none of {', '.join(_COMPILERS)} is on the PATH and CC is not set")


def cache_folder() -> Path:
    """The folder for built libraries, created if need be; ``HF_MEMOPT_CACHE``, else ``hf_memopt`` in the user's cache
    folder.

    Raises:
        OSError: it cannot be created or written, or others could write it.
    """
    named = os.environ.get("HF_MEMOPT_CACHE")
    if named:
        root = Path(os.path.realpath(os.path.expanduser(named)))
    else:
        cache = os.environ.get("XDG_CACHE_HOME", "")
        try:
            home = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
        except RuntimeError as error:  # a user without a home folder, as in some containers
            raise FileNotFoundError(f"{error}; set HF_MEMOPT_CACHE to a folder of your own") from None
        root = Path(os.path.realpath(home)) / "hf_memopt"
    root.parent.mkdir(parents=True, exist_ok=True)
    folder = root / "kernels"
    for each in (root, folder):
        try:
            each.mkdir(mode=0o700)
        except FileExistsError:
            pass
        if not _is_private(each, stat.S_ISDIR):
            raise PermissionError(f"{each} is not a folder that this user owns and nobody else can write")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")
    return folder


def _is_private(path: Path, right_kind) -> bool:
    """Whether ``path`` itself (not what a link points to) is of the right kind, this user's, and writable by nobody
    else."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return right_kind(found.st_mode) and found.st_uid == os.geteuid() and not others_write


def _is_whole(path: Path) -> bool:
    """Whether the content is what the name says."""
    try:
        return path.stem.rpartition("-")[2] == _hash(path.read_bytes())
    except OSError:
        return False


def _hash(*parts: bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.hexdigest()[:32]


def _key(compiler: list[str]) -> str:
    """A hash of everything that decides the content of the library."""
    here = Path(__file__).parent
    sources = [path.read_bytes() for path in (here / _SOURCE, *sorted(here.glob("*.h")))]
    settings = repr((compiler, _version(compiler), _FLAGS, _NATIVE, platform.machine(), _processor()))
    return _hash(*sources, settings.encode())


def _version(compiler: list[str]) -> str:
    try:
        answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=_COMPILE_TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C compiler {compiler[0]} could not be started: {error}") from None
    if answer.returncode != 0:
        raise BuildError(f"the C compiler {compiler[0]} does not work: {_first_line(answer.stderr)}")
    return answer.stdout


def _processor() -> str:
    """Model and instruction sets of the processor: code for another one may not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
    )
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in wanted)


def _build(compiler: list[str], key: str, folder: Path) -> Path:
    """Compile into ``folder``; the library appears there whole or not at all."""
    handle, name = tempfile.mkstemp(prefix="building-", suffix=".so", dir=folder)
    os.close(handle)
    unfinished = Path(name)
    try:
        _compile(compiler, unfinished)
        os.chmod(unfinished, 0o700)
        path = folder / f"{key}-{_hash(unfinished.read_bytes())}.so"
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    for other in folder.glob(f"{key}-*.so"):  # damaged ones
        if other != path and not _is_whole(other):
            other.unlink(missing_ok=True)
    return path


def _compile(compiler: list[str], to: Path, more_flags: tuple[str, ...] = ()) -> None:
    source = Path(__file__).with_name(_SOURCE)
    said = ""
    for native in _NATIVE:
        command = [*compiler, *_FLAGS, *native, *more_flags, str(source), "-o", str(to), "-lm"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT)
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"the C compiler {compiler[0]} could not be started: {error}") from None
        if answer.returncode == 0:
            return
        said = said or answer.stderr
    raise BuildError(f"{compiler[0]} could not compile it: {_first_line(said)}")


def _first_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no message"]
    return lines[0].strip()


def _load_privately(compiler: list[str], key: str, why: str) -> ctypes.CDLL:
    _logger.warning("The CPU kernel is built for this process alone, since the cache cannot be used: %s.", why)
    try:
        # mode 0700; a loaded library needs its file no longer
        with tempfile.TemporaryDirectory(prefix="hf_memopt-") as folder:
            return _open(_build(compiler, key, Path(folder)))
    except OSError as error:
        raise BuildError(f"it can be built neither in the cache ({why}) nor in a temporary folder ({error})") from None


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the built library could not be loaded: {error}") from None
