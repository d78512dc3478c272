"""What a stranger types first: the README's commands, the versions, the packaged files, the configurations."""

import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

import hf_memopt

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md")
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf8")


def pyproject() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")
    return tomllib.loads(read("pyproject.toml"))


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_in_the_pages_exist(page):
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", read(page), re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    assert named and named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_modules_in_the_pages_can_be_found(page):
    for module in re.findall(r"python -m ([\w.]+)", read(page)):
        assert importlib.util.find_spec(module), f"{page} names `python -m {module}`"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "docs/taco_adamw.md"])
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)\)", read(page)):
        assert target.startswith("https://") or (folder / target).exists(), f"{page} links to {target}"


def test_files_in_backticks_exist():
    for name in re.findall(
        r"`((?:tests|examples|configs|hf_memopt|benchmarks|docs|\.ci)/[\w./]+)`", "".join(map(read, PAGES))
    ):
        assert (ROOT / name).exists(), name


def test_hf_memopt_list_runs():
    done = subprocess.run([sys.executable, "-m", "hf_memopt", "list"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "taco_adamw" in done.stdout


def test_one_version():
    newest = re.search(r"^## \[(\d[^\]]*)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert newest[1] == hf_memopt.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", hf_memopt.__version__)
    try:
        installed = importlib.metadata.version("hf-memopt")
    except importlib.metadata.PackageNotFoundError:
        return
    assert installed == hf_memopt.__version__


def test_every_file_of_the_package_is_packaged():
    globs = pyproject()["tool"]["setuptools"]["package-data"]["hf_memopt"]
    packaged = {p for g in globs for p in (ROOT / "hf_memopt").glob(g)}
    others = {p for p in (ROOT / "hf_memopt").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert others <= packaged, sorted(str(p.relative_to(ROOT)) for p in others - packaged)
    for folder in {p.parent for p in (ROOT / "hf_memopt").rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), folder


def test_floors_are_said_once():
    project = pyproject()["project"]
    for name in ("torch", "transformers"):
        (floor,) = (d for d in project["dependencies"] if d.startswith(f"{name}>="))
        assert floor.replace(">=", " >= ") in read("README.md")
    assert project["requires-python"].removeprefix(">=") in read("README.md")


def test_every_installed_package_is_locked():
    def names(path):
        lines = [line.strip() for line in read(path).splitlines() if line.strip() and line[0] not in "#-"]
        return {re.split(r"[=; ]", line)[0].lower() for line in lines}

    locked = names("requirements/lock.txt")
    assert names("requirements/demo.txt") <= locked
    assert names("requirements/test.txt") <= locked
    pins = [line for line in read("requirements/lock.txt").splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+( ; python_version >= \"3\.11\")?$", line) for line in pins)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_configs_load(path, tmp_path):
    from transformers import HfArgumentParser, TrainingArguments

    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    name = getattr(args.optim, "value", args.optim)
    spec = hf_memopt.get_optimizer(name)
    assert spec.options.strategy == path.stem
    hf_memopt.parse_options(spec.options, args.optim_args, preset=spec.preset)


def test_the_demo_packages_are_pinned_by_hash():
    from tools.demo_assets import pins

    assert len(pins()) == 5
    assert all(re.fullmatch(r"[0-9a-f]{64}", d) and re.fullmatch(r"[\w-]+==[\d.]+", r) for d, r in pins().items())
