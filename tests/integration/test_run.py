"""``python -m hf_memopt.run``: a script that does not know the package sees what plain Python shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = """
import json, os, sys
shown = {
    "name": __name__,
    "argv": sys.argv,
    "path0": sys.path[0],
    "file": globals().get("__file__"),
    "package": __package__ or None,
    "main_is_me": sys.modules["__main__"].__dict__ is globals(),
}
print(json.dumps(shown))
"""


def run(*command: str, cwd: Path, expect: int = 0, **env: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def shown(done: subprocess.CompletedProcess) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def scripts(tmp_path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "show.py").write_text(SHOW)
    (tmp_path / "scripts" / "helper.py").write_text("value = 3")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "show.py").write_text(SHOW)
    return tmp_path


def test_script_as_under_plain_python(scripts):
    plain = shown(run("scripts/show.py", "--a", "-m", "b c", cwd=scripts))
    ours = shown(run("-m", "hf_memopt.run", "scripts/show.py", "--a", "-m", "b c", cwd=scripts))
    assert ours == plain
    assert ours["argv"] == ["scripts/show.py", "--a", "-m", "b c"]


def test_module_as_under_plain_python(scripts):
    plain = shown(run("-m", "pkg.show", "--a", "b", cwd=scripts))
    ours = shown(run("-m", "hf_memopt.run", "-m", "pkg.show", "--a", "b", cwd=scripts))
    assert ours == plain


def test_script_imports_its_neighbours(scripts):
    (scripts / "scripts" / "main.py").write_text("import helper; print(helper.value)")
    assert run("-m", "hf_memopt.run", "scripts/main.py", cwd=scripts).stdout.split() == ["3"]


def test_exit_status_and_error_of_the_script(scripts):
    (scripts / "fail.py").write_text("import sys; sys.exit(7)")
    (scripts / "raise.py").write_text("raise KeyError('mine')")
    run("-m", "hf_memopt.run", "fail.py", cwd=scripts, expect=7)
    assert "KeyError: 'mine'" in run("-m", "hf_memopt.run", "raise.py", cwd=scripts, expect=1).stderr


def test_worker_processes_find_the_scripts_main(scripts):
    (scripts / "spawn.py").write_text(
        "import multiprocessing as mp\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(double, [1, 2]))\n"
    )
    assert run("-m", "hf_memopt.run", "spawn.py", cwd=scripts).stdout.split("\n")[0] == "[2, 4]"


def test_usage_and_missing_script(scripts):
    assert "usage: python -m hf_memopt.run script.py" in run("-m", "hf_memopt.run", cwd=scripts, expect=2).stderr
    assert "usage:" in run("-m", "hf_memopt.run", "-m", cwd=scripts, expect=2).stderr
    assert "usage:" in run("-m", "hf_memopt.run", "-c", "pass", cwd=scripts, expect=2).stderr
    assert "there is no file 'none.py'" in run("-m", "hf_memopt.run", "none.py", cwd=scripts, expect=2).stderr
    assert "torchrun" in run("-m", "hf_memopt.run", "--help", cwd=scripts).stdout


@pytest.mark.parametrize(
    "target, sentence",
    [
        (["-m", "nomod"], "No module named 'nomod'."),
        (["-m", "pkg.none"], "No module named 'pkg.none'."),
        (["-m", "pkg.show.none"], "No module named 'pkg.show.none'."),
        (["-m", "none.at.all"], "No module named 'none.at.all'."),
        (["-m", ".show"], "No module named '.show'."),
        (["-m", ""], "No module named ''."),
        (["-m", "pkg"], "No module named 'pkg.__main__'; 'pkg' is a package and cannot be run itself."),
        (["-m", "scripts"], "No module named 'scripts.__main__'; 'scripts' is a package and cannot be run itself."),
        (
            ["-m", "root.py"],
            "No module named 'root.py'; a script is run without -m: python -m hf_memopt.run root.py.",
        ),
        (["scripts"], "there is no __main__.py in 'scripts'."),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_run_is_said_in_one_sentence(scripts, target, sentence):
    (scripts / "root.py").write_text(SHOW)
    run(*target, cwd=scripts, expect=1)  # plain Python's status
    assert run("-m", "hf_memopt.run", *target, cwd=scripts, expect=1).stderr == f"hf_memopt.run: {sentence}\n"


def test_a_package_and_a_folder_with_a_main_are_run(scripts):
    for folder in ("pkg", "scripts"):
        (scripts / folder / "__main__.py").write_text(SHOW)
    for target in (["-m", "pkg"], ["-m", "pkg.__main__"], ["scripts"]):
        plain = shown(run(*target, cwd=scripts))
        ours = shown(run("-m", "hf_memopt.run", *target, cwd=scripts))
        plain["main_is_me"] = ours["main_is_me"] = None  # runpy has a module of its own there
        ours["path0"] = str(scripts / ours["path0"])
        assert ours == plain


def test_import_errors_of_the_program_itself_keep_their_traceback(scripts):
    for name in ("outer", "outer/inner"):
        (scripts / name).mkdir()
    (scripts / "outer" / "__init__.py").write_text("import missing_dependency")
    (scripts / "own.py").write_text("import missing_dependency")
    for module in ("outer.inner", "own"):
        err = run("-m", "hf_memopt.run", "-m", module, cwd=scripts, expect=1).stderr
        assert "Traceback" in err and "No module named 'missing_dependency'" in err


def test_a_training_script_that_does_not_know_the_package(tmp_path):
    """It builds its parser and Trainer itself; the name comes from the command line."""
    (tmp_path / "train.py").write_text(
        "import sys\n"
        f"sys.path.append({os.path.dirname(__file__)!r})\n"
        "from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments\n"
        "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "import torch\n"
        "shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)\n"
        "config = LlamaConfig(vocab_size=64, **shape)\n"
        "rows = [{'input_ids': torch.arange(8), 'labels': torch.arange(8)}] * 8\n"
        "trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)\n"
        "trainer.train()\n"
        "print(type(trainer.optimizer.optimizer).__name__)\n"
    )
    options = [
        "--output_dir",
        "out",
        "--optim",
        "taco_adamw",
        "--optim_args",
        "seed=3",
        "--max_steps",
        "2",
        "--use_cpu",
        "true",
    ]
    command = ["train.py", *options, "--report_to", "none"]
    assert "TacoAdamW" in run("-m", "hf_memopt.run", *command, cwd=tmp_path, HF_HUB_OFFLINE="1").stdout
    assert "taco_adamw" in run(*command, cwd=tmp_path, expect=2, HF_HUB_OFFLINE="1").stderr
