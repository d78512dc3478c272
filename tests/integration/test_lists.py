"""What docs/trainer.md says about lists: ``HfArgumentParser`` refuses them, a regular expression and YAML do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tiny_llama import inner, tiny_llama, trainer
from transformers import HfArgumentParser, TrainingArguments

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trainer.md").read_text(encoding="utf8")


def parsed(*options: str) -> TrainingArguments:
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--use_cpu", "true", *options])[0]


def ternary(target_modules, tmp_path) -> set[str]:
    t = trainer(tmp_path, model=tiny_llama(), optim_target_modules=target_modules)
    t.create_optimizer()
    groups = inner(t.optimizer).param_groups
    return {name for g in groups if g["treatment"] == "ternary" for name in g["param_names"]}


@pytest.mark.parametrize("option", ["--report_to hf_memopt tensorboard", "--optim_target_modules q_proj v_proj"])
def test_two_values_are_refused_by_the_parser(option):
    with pytest.raises(ValueError, match="not used by the HfArgumentParser"):
        parsed(*option.split())


def test_the_command_on_the_page_and_its_yaml_say_the_same(tmp_path):
    (command,) = re.findall(r"^python train\.py (.*optim_target_modules.*)$", PAGE, re.MULTILINE)
    from_command = parsed(*shlex.split(command))
    (tmp_path / "train.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1] + "use_cpu: true\n")
    (from_yaml,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(tmp_path / "train.yaml"))
    assert from_yaml.report_to == ["hf_memopt", "tensorboard"] and from_command.report_to == ["hf_memopt"]
    chosen = [ternary(args.optim_target_modules, tmp_path) for args in (from_command, from_yaml)]
    assert chosen[0] == chosen[1]
    assert chosen[0] == {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "qv"}
