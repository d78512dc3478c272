"""The README's program and every example run as a person would run them, on the demo's model and texts."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

import hf_memopt
from tests.assets import needs_assets
from tools.demo_assets import demo_dir

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def python(*arguments: str, cwd: pathlib.Path) -> tuple[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_short_and_say_how_to_run_them(path):
    text = path.read_text(encoding="utf8")
    assert len(text.splitlines()) < 100
    assert f"python examples/{path.name}" in text.split('"""')[1]


@needs_assets
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_trains(path, tmp_path):
    short = ["--max_steps", "3", "--block_tokens", "64", "--held_out_blocks", "2", "--warmup_steps", "0"]
    out, err = python(str(path), *short, "--output_dir", str(tmp_path), cwd=tmp_path)
    before, after = map(float, re.search(r"held-out loss: ([\d.]+) -> ([\d.]+) in 3 steps", out).groups())
    assert 1 < after < before < 10
    assert "tokenising the training texts: 100%" in err, "what takes seconds shows that it is at work"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_a_configuration_is_its_strategys_and_its_options_exist(path):
    given = yaml.safe_load(path.read_text(encoding="utf8"))
    spec = hf_memopt.get_optimizer(given["optim"])
    assert spec.options.strategy == path.stem
    hf_memopt.parse_options(spec.options, given["optim_args"], strategy=spec.name, preset=spec.preset)


@needs_assets
def test_the_program_of_update_in_backward_runs(tmp_path):
    page = (ROOT / "docs" / "update_in_backward.md").read_text(encoding="utf8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / ".demo").symlink_to(demo_dir())
    out, err = python("-c", program, cwd=tmp_path)
    assert "TacoAdamW with update in backward" in out + err and "memopt/bits_per_param" in out


@needs_assets
def test_the_program_in_the_readme_runs(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf8"), re.DOTALL)
    (tmp_path / ".demo").symlink_to(demo_dir())
    out, _ = python("-c", program, cwd=tmp_path)
    assert "134,515,008" in out
