"""Does the package work with other versions of transformers? Installs each into its own folder and runs ``check.py``.

    python tests/compat/run_compat.py                       the versions below
    python tests/compat/run_compat.py 4.55.4 5.3.0          others
    python tests/compat/run_compat.py --output compat.json  also write the results

torch is the one of the running Python (linked, not copied: it is large and not what varies here); everything else that
transformers needs is what pip resolves for that version. The exit status is the number of versions that failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

VERSIONS = ("4.50.3", "4.57.6", "5.0.0", "5.12.1", "5.24.0")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def pip_install(target: Path, *requirements: str) -> None:
    """Install into the folder ``target``; pip's message is shown if that fails."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip install {' '.join(requirements)}: {done.stderr.strip()}")


def needed(distribution: importlib.metadata.Distribution) -> list[Requirement]:
    """What ``distribution`` requires here, extras aside."""
    found = map(Requirement, distribution.requires or [])
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def install(version: str, target: Path) -> None:
    """transformers ``version`` and accelerate with what they need, torch excepted."""
    if target.exists():
        return
    unfinished = target.with_name(f"{target.name}.installing")
    pip_install(unfinished, "--no-deps", "--upgrade", f"transformers=={version}", "accelerate")
    wanted = {}
    for distribution in importlib.metadata.distributions(path=[str(unfinished)]):
        wanted |= {str(r): r for r in needed(distribution) if r.name not in ("torch", "transformers", "accelerate")}
    pip_install(unfinished, *(f"{r.name}{r.specifier}" for r in wanted.values()), "pyyaml")
    unfinished.rename(target)


def link_torch(target: Path) -> None:
    """Links in ``target`` to the files of torch and of what it needs, and to nothing else of the running Python."""
    target.mkdir(parents=True, exist_ok=True)
    todo, done = ["torch"], set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        distribution = importlib.metadata.distribution(name)
        todo += [r.name for r in needed(distribution)]
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "bin")}:
            if not (target / top).is_symlink():
                (target / top).symlink_to(Path(distribution.locate_file(top)).resolve())


def revision() -> str:
    """The commit under test, with + when the package's files differ from it; unknown outside a repository."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    return commit + ("+" if git("status", "--porcelain", "--", "hf_memopt") else "") if commit else "unknown"


def check(version: str, work: Path) -> dict:
    """Install ``version`` and run ``check.py`` with it; its answer, or what went wrong."""
    try:
        install(version, work / version)
    except RuntimeError as error:
        return {"passed": False, "error": str(error)}
    path = [ROOT, HERE.parent / "integration", work / version, work / "torch"]
    done = subprocess.run(
        [sys.executable, "-S", str(HERE / "check.py")],  # -S: without the running Python's own packages
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"passed": False, "error": (done.stdout + done.stderr)[-4000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="versions of transformers")
    parser.add_argument("--work", type=Path, help="folder for the installations, kept for the next time")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        link_torch(work / "torch")
        for version in args.versions:
            results[version] = result = check(version, work)
            failed = [name for name, outcome in result.get("checks", {}).items() if outcome != "passed"]
            reason = result.get("error") or ", ".join(failed)
            print(f"transformers {version}: {'passed' if result['passed'] else f'FAILED: {reason}'}", flush=True)
    if args.output:
        everything = {"python": platform.python_version(), "hf_memopt": revision(), "transformers": results}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(everything, indent=2) + "\n")
    return sum(not result["passed"] for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
