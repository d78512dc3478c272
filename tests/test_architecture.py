"""The code's shape: imports point downward, files stay small, every strategy is complete, nothing names one machine."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import hf_memopt

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_memopt"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# lowest first; a file may import from its own layer and from those before it
LAYERS = (
    ("parsing", "options", "codecs", "kernels", "projections"),
    ("activations", "optim", "param_groups"),
    ("registry", "memory"),
    ("integrations",),
    ("cli", "run", "__init__", "__main__"),
)


def layer(name: str) -> int:
    """Index of a module's layer; the module is named by its path below the package. Raises LookupError without one."""
    for index, names in enumerate(LAYERS):
        if name.split(".")[0] in names:
            return index
    raise LookupError(f"hf_memopt.{name} stands in no layer of tests/test_architecture.py")


def inner_imports(path: pathlib.Path) -> set[str]:
    """Modules of the package that a file imports anywhere, named below the package; `__init__` is the package."""
    here = list(path.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                target = here[: len(here) - node.level] + (node.module or "").split(".")
            elif node.module and node.module.split(".")[0] == PACKAGE.name:
                target = node.module.split(".")[1:]
            else:
                continue
            target = [part for part in target if part]
            found |= {".".join(target)} if target else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package, _, rest = alias.name.partition(".")
                if package == PACKAGE.name:
                    found.add(rest or "__init__")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_downward(path):
    mine = layer(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    for target in inner_imports(path):
        assert layer(target) <= mine, f"{path.relative_to(ROOT)} imports hf_memopt.{target} from above"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_files_keep_their_budget_and_say_what_they_are(path):
    text = path.read_text(encoding="utf8")
    assert len(text.splitlines()) <= MAX_LINES
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a module docstring says what the file is for"


def test_transformers_and_peft_are_imported_in_integrations_only():
    for path in FILES:
        if "integrations" not in path.parts:
            found = re.findall(
                r"^\s*(?:from|import) (transformers|peft)\b", path.read_text(encoding="utf8"), re.MULTILINE
            )
            assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_the_import_brings_in_nothing_optional():
    code = "import sys, hf_memopt; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"triton", "peft", "bitsandbytes"} & set(done.stdout.split())


@pytest.mark.parametrize("spec", hf_memopt.list_optimizers(), ids=lambda s: s.name)
def test_every_strategy_is_complete(spec):
    assert (ROOT / spec.docs).is_file()
    strategy = spec.options.strategy  # several names may be one strategy with other presets
    assert (ROOT / "examples" / f"{pathlib.Path(spec.docs).stem}.py").is_file()  # one page, one example
    assert (ROOT / "configs" / f"{strategy}.yaml").is_file()
    readme = (ROOT / "README.md").read_text(encoding="utf8")
    assert re.search(rf"^\| `{spec.name}` \|.*\({re.escape(spec.docs)}\)", readme, re.MULTILINE)
    assert spec.load_builder() and spec.summary and spec.paper


def test_every_public_name_exists_and_is_described():
    for name in hf_memopt.__all__:
        value = getattr(hf_memopt, name)
        assert name == "__version__" or value.__doc__, name


def text_files() -> list[pathlib.Path]:
    folders = ("hf_memopt", "tests", "benchmarks", "examples", "configs", "docs", "tools", "requirements", ".ci")
    kinds = {".py", ".c", ".md", ".yaml", ".txt", ".toml", ".json", ""}
    found = [p for f in folders for p in (ROOT / f).rglob("*") if p.is_file() and p.suffix in kinds]
    return found + [p for p in ROOT.iterdir() if p.is_file() and p.suffix in kinds and p.name != ".git"]


def test_nothing_names_one_machine():
    # in two pieces, so that this file does not match itself
    pattern = re.compile("|".join("/" + rest for rest in (r"work/", r"root/", r"home/\w", r"tmp/w\b")))
    for path in text_files():
        match = pattern.search(path.read_text(encoding="utf8", errors="replace"))
        assert not match, f"{path.relative_to(ROOT)} holds the path {match[0]}"
