"""Building and caching the C kernel: what is kept, what is trusted, and what happens where it cannot be built.

Where only the caching matters, the "compiler" is a script that copies a library built once by the real one, and
writes down that it was called.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memopt.kernels import build
from tests.conftest import require_kernel

USE = """
import torch
from hf_memopt.kernels import compiled, reference
from tests.kernels.test_compiled import gradients, randn, run_both
print(compiled.available())
run_both("ternary_adamw_", randn(40, 333), gradients((40, 333), 2))
"""
# A library that leaves a mark when it is loaded.
INTRUDER = """
#include <stdlib.h>
#include <fcntl.h>
__attribute__((constructor)) static void loaded(void) { open(getenv("INTRUDER_MARK"), O_CREAT | O_WRONLY, 0600); }
"""
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A real library, built once."""
    require_kernel("compiled")
    path = tmp_path_factory.mktemp("library") / "kernel.so"
    build._compile(build.find_compiler(), path)
    return path


@pytest.fixture
def calls(tmp_path, monkeypatch, library) -> Path:
    """A compiler that is quick; each compilation adds a line to the file returned."""
    log = tmp_path / "calls"
    log.touch()
    compiler = tmp_path / "bin" / "quick-cc"
    compiler.parent.mkdir()
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo quick 1.0; exit; fi\n'
        f'while [ "$1" != -o ]; do shift; done\necho compiled >> {log}\ncp {library} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    return log


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_MEMOPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def compilations(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def the_library(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


# -- the cache -------------------------------------------------------------------------------------------------------


def test_built_once_and_kept(calls, cache):
    assert build.load().hf_memopt_sizes(0) == build.load().hf_memopt_sizes(0)
    assert compilations(calls) == 1
    for private in (cache.parent, cache):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE(the_library(cache).stat().st_mode) == 0o700


def test_another_compiler_or_flag_is_another_library(calls, cache, monkeypatch):
    build.load()
    compiler = Path(os.environ["CC"])
    compiler.write_text(compiler.read_text().replace("quick 1.0", "quick 1.1"))
    build.load()
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    build.load()
    monkeypatch.setattr(build, "_processor", lambda: "another processor")
    build.load()
    assert compilations(calls) == 4
    assert len(list(cache.iterdir())) == 4


def test_where_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_MEMOPT_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "hf_memopt" / "kernels"
    for none in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert build.cache_folder() == tmp_path / "home" / ".cache" / "hf_memopt" / "kernels"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("HF_MEMOPT_CACHE", str(tmp_path / "link" / "mine"))
    assert build.cache_folder() == tmp_path / "elsewhere" / "mine" / "kernels"


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:5000] + b"\0" * 64 + b[5064:]]
)
def test_a_damaged_library_is_built_again(calls, cache, damage):
    build.load()
    path = the_library(cache)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    build.load()
    assert compilations(calls) == 2
    assert the_library(cache).read_bytes() == content


def test_processes_that_build_at_the_same_time(tmp_path, monkeypatch):
    """With the real compiler: all of them get a working library, one is kept, nothing unfinished is left."""
    require_kernel("compiled")
    env = {**os.environ, "HF_MEMOPT_CACHE": str(tmp_path / "cache")}
    started = [
        subprocess.Popen([sys.executable, "-c", USE], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in started:
        assert process.communicate()[0].strip() == "(True, '')"
        assert process.returncode == 0
    path = the_library(tmp_path / "cache" / "kernels")
    assert path.suffix == ".so" and build._is_whole(path)


# -- what is trusted -------------------------------------------------------------------------------------------------


def writable_by_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def writable_by_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def behind_a_link(path: Path) -> None:
    moved = path.with_name("moved away")
    path.rename(moved)
    path.symlink_to(moved)


def of_another_user(path: Path) -> None:
    os.chown(path, 65534, -1)


@pytest.mark.parametrize("place", ["library", "folder", "folder above"])
@pytest.mark.parametrize(
    "change", [writable_by_group, writable_by_all, behind_a_link, pytest.param(of_another_user, marks=as_root)]
)
def test_what_others_could_have_written_is_not_loaded(calls, cache, monkeypatch, tmp_path, caplog, place, change):
    if (place, change) == ("folder above", behind_a_link):
        monkeypatch.delenv("HF_MEMOPT_CACHE")  # which may be a link: the user named it
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        cache = tmp_path / "xdg" / "hf_memopt" / "kernels"
    build.load()
    path = intruder_in_place_of(the_library(cache), tmp_path, monkeypatch)
    change({"library": path, "folder": cache, "folder above": cache.parent}[place])
    with caplog.at_level(logging.WARNING, logger="hf_memopt"):
        assert build.load().hf_memopt_sizes(0) > 0
    assert not (tmp_path / "mark").exists()
    assert compilations(calls) == 2
    (line,) = caplog.messages
    assert "for this process alone" in line and str(tmp_path) in line


def test_the_intruder_would_leave_its_mark(calls, cache, monkeypatch, tmp_path):
    """Guards the test above: the same library in a private place is loaded."""
    build.load()
    intruder_in_place_of(the_library(cache), tmp_path, monkeypatch)
    build.load()
    assert (tmp_path / "mark").exists()


def intruder_in_place_of(path: Path, tmp_path: Path, monkeypatch) -> Path:
    """Another library under the name that it would have in the cache."""
    source, built = tmp_path / "intruder.c", tmp_path / "intruder.so"
    source.write_text(INTRUDER)
    monkeypatch.setenv("INTRUDER_MARK", str(tmp_path / "mark"))
    compiler = next(filter(None, map(shutil.which, build._COMPILERS)))
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    content = built.read_bytes()
    planted = path.with_name(f"{path.stem.partition('-')[0]}-{build._hash(content)}.so")
    path.unlink()
    planted.write_bytes(content)
    planted.chmod(0o700)
    return planted


# -- where there is no cache -----------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_made(calls, tmp_path, monkeypatch, caplog):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HF_MEMOPT_CACHE", str(tmp_path / "a file" / "cache"))
    private_folders = tmp_path / "private"
    private_folders.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(private_folders))
    with caplog.at_level(logging.WARNING, logger="hf_memopt"):
        assert build.load().hf_memopt_sizes(0) > 0
    assert len(caplog.messages) == 1 and "for this process alone" in caplog.messages[0]
    assert list(private_folders.iterdir()) == []


def test_a_home_that_cannot_be_written(calls, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    env = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "HF_MEMOPT_CACHE")}
    done = subprocess.run(
        [
            *without_root_privilege(),
            sys.executable,
            "-c",
            "from hf_memopt.kernels import compiled; print(compiled.available())",
        ],
        env={**env, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "(True, '')"
    assert "for this process alone" in done.stderr and str(home) in done.stderr
    assert list(home.iterdir()) == []


def without_root_privilege() -> list[str]:
    """How to start a process that permissions apply to: for root, without the capability to ignore them."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root ignores permissions, and there is no setpriv here to change that")
    capabilities = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]


# -- where there is no compiler --------------------------------------------------------------------------------------

TRAIN = """
import logging, sys, torch
logging.basicConfig()
from hf_memopt import TacoAdamW
p, q = torch.nn.Parameter(torch.ones(64, 200)), torch.nn.Parameter(torch.ones(64, 200))
try:
    optimizer = TacoAdamW([p, q], kernel=sys.argv[1])
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
    print("stepped", bool((p < 1).all()))
except ValueError as error:
    print(error)
"""


def train(kernel: str, tmp_path: Path, **env) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "CC"}
    clean |= {"HF_MEMOPT_CACHE": str(tmp_path / "cache"), **env}
    return subprocess.run([sys.executable, "-c", TRAIN, kernel], env=clean, capture_output=True, text=True, check=True)


def broken_compiler(tmp_path: Path) -> str:
    script = tmp_path / "broken-cc"
    script.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit\necho 'file.c:1: error: out of ideas' >&2\nexit 1\n")
    script.chmod(0o755)
    return str(script)


CASES = {
    "none": (lambda folder: {"PATH": str(folder)}, "no C compiler was found"),
    "named one missing": (
        lambda folder: {"CC": "no-such-cc -m64"},
        "'no-such-cc' named by the environment variable CC",
    ),
    "broken": (lambda folder: {"CC": broken_compiler(folder)}, "error: out of ideas"),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_takes_the_reference_and_says_so_once(case, tmp_path):
    env, why = CASES[case]
    done = train("auto", tmp_path, **env(tmp_path))
    assert done.stdout.strip() == "stepped True"
    (line,) = [line for line in done.stderr.splitlines() if "kernel" in line]
    assert why in line and "reference" in line


@pytest.mark.parametrize("case", CASES)
def test_compiled_is_refused_in_one_sentence(case, tmp_path):
    env, why = CASES[case]
    done = train("compiled", tmp_path, **env(tmp_path))
    (line,) = done.stdout.splitlines()
    assert why in line and "kernel=auto" in line and line.endswith(".")
    assert done.stderr == ""


def test_loading_changes_nothing_about_arithmetic():
    """No start-up code that flushes subnormal numbers to zero, which -ffast-math would link in."""
    require_kernel("compiled")
    check = (
        "import torch; from hf_memopt.kernels import compiled; assert compiled.available()[0]\n"
        "assert torch.tensor([1e-40]).mul(0.5).item() > 0 and 5e-324 > 0.0 and 2.2e-308 / 4 > 0.0"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_cc_that_is_no_command_is_named(monkeypatch):
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(build.BuildError, match="CC='gcc \"' is not a command"):
        build.find_compiler()


def test_a_user_without_a_home_gets_a_private_build(monkeypatch, caplog):
    for name in ("HOME", "XDG_CACHE_HOME", "HF_MEMOPT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does for a uid without an entry
    with caplog.at_level("WARNING", "hf_memopt"):
        assert build.load() is not None
    assert "HF_MEMOPT_CACHE" in caplog.text


def test_no_folder_at_all_is_a_build_error(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("HF_MEMOPT_CACHE", str(file))
    monkeypatch.setattr("tempfile.tempdir", str(file))
    with pytest.raises(build.BuildError, match="neither in the cache .* nor in a temporary folder"):
        build.load()
