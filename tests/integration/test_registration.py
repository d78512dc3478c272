"""The names as transformers, argparse, configuration files and pickles see them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import yaml
from tiny_llama import arguments, inner, tiny_llama, trainer
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_memopt
from hf_memopt.integrations.trainer import WRAPPED, register

NAMES = [spec.name for spec in hf_memopt.list_optimizers()]


def python(code: str, *, expect: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Run ``code`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("name", NAMES)
def test_member_behaves_like_the_others(name):
    member = OptimizerNames(name)
    assert member is OptimizerNames[name.upper()] is getattr(OptimizerNames, name.upper())
    assert (member.name, member.value, str(member.value)) == (name.upper(), name, name)
    assert isinstance(member, OptimizerNames) and isinstance(member, str) and member == name
    assert list(OptimizerNames).count(member) == 1
    assert hash(member) == hash(OptimizerNames(name)) and {member: 1}[OptimizerNames(name)] == 1
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is member


def test_registering_again_changes_nothing():
    before = list(OptimizerNames), Trainer.get_optimizer_cls_and_kwargs, Trainer.save_model
    from transformers.trainer import DEFAULT_CALLBACKS

    callbacks = list(DEFAULT_CALLBACKS)
    register()
    register()
    assert (list(OptimizerNames), Trainer.get_optimizer_cls_and_kwargs, Trainer.save_model) == before
    assert callbacks == DEFAULT_CALLBACKS
    assert callbacks.count(hf_memopt.MemoptCallback) == 1
    for wrapped in (Trainer.get_optimizer_cls_and_kwargs, Trainer.save_model):
        assert not getattr(wrapped.__wrapped__, WRAPPED, False)


@pytest.mark.parametrize("first", ["import hf_memopt", "from transformers import Trainer, TrainingArguments"])
def test_order_of_imports_does_not_matter(first):
    done = python(
        f"""
        {first}
        import hf_memopt
        from transformers import Trainer, TrainingArguments
        from transformers.trainer import DEFAULT_CALLBACKS
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
        args = TrainingArguments("unused", optim="taco_adamw", optim_args="seed=3", use_cpu=True)
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
        reporter = INTEGRATION_TO_CALLBACK["hf_memopt"]
        print(cls.__name__, kwargs["seed"], DEFAULT_CALLBACKS[-1].__name__, reporter.__name__)
        """
    )
    assert done.stdout.split() == ["TacoAdamW", "3", "MemoptCallback", "MemoryReportCallback"]


def test_import_is_light():
    """No torch, no transformers and nothing optional: the names are added when transformers is imported."""
    done = python(
        """
        import sys
        import hf_memopt
        print(hf_memopt.list_optimizers()[0].name, hf_memopt.__version__)
        heavy = {"torch", "transformers", "triton", "peft", "bitsandbytes"}
        print(*sorted({m.split(".")[0] for m in sys.modules} & heavy))
        """
    )
    assert done.stdout.splitlines()[1] == ""


def test_public_names():
    assert all(getattr(hf_memopt, name) is not None for name in hf_memopt.__all__)
    assert set(hf_memopt.__all__) <= set(dir(hf_memopt))
    assert hf_memopt.__all__ == sorted(hf_memopt.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_memopt.no_such_name  # noqa: B018


# -- arguments ------------------------------------------------------------------------------------------------------


def test_command_line(tmp_path):
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--optim", "taco_adamw", "--optim_args", "seed=7,dense_embeddings=true"]
        + ["--use_cpu", "true", "--adam_beta2", "0.95"]
    )
    assert args.optim is OptimizerNames("taco_adamw")
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, tiny_llama())
    assert cls is hf_memopt.TacoAdamW
    assert (kwargs["seed"], kwargs["betas"]) == (7, (0.9, 0.95))
    assert "dense_embeddings=true" in {group["reason"] for group in kwargs["params"]}


def test_command_line_typo_lists_our_names(tmp_path, capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--optim", "tako_adamw"]
        )
    assert "taco_adamw" in capsys.readouterr().err


def test_typo_lists_our_names(tmp_path):
    with pytest.raises(ValueError, match="tako_adamw is not a valid OptimizerNames.*taco_adamw"):
        arguments(tmp_path, optim="tako_adamw")


@pytest.mark.parametrize("optim_args", ["seed=7,kernel=reference", {"seed": 7, "kernel": "reference"}])
def test_yaml_and_json_files(tmp_path, optim_args):
    values = {"output_dir": str(tmp_path), "optim": "taco_adamw", "optim_args": optim_args, "use_cpu": True}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "c.json").write_text(json.dumps(values))
    parser = HfArgumentParser(TrainingArguments)
    for (args,) in (parser.parse_yaml_file(str(tmp_path / "c.yaml")), parser.parse_json_file(str(tmp_path / "c.json"))):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
        assert (cls, kwargs["seed"], kwargs["kernel"]) == (hf_memopt.TacoAdamW, 7, "reference")


def test_arguments_survive_dict_json_and_pickle(tmp_path):
    args = arguments(tmp_path, optim_args="seed=7")
    assert args.to_dict()["optim"] == "taco_adamw"
    assert json.loads(args.to_json_string())["optim"] == "taco_adamw"
    again = TrainingArguments(**{k: args.to_dict()[k] for k in ("output_dir", "optim", "optim_args", "use_cpu")})
    assert again.optim is args.optim and again.optim_args == "seed=7"
    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.optim is OptimizerNames("taco_adamw") and loaded.optim_args == "seed=7"


def test_saved_training_args_of_a_checkpoint_load_in_another_process(tmp_path):
    trainer(tmp_path, max_steps=2).train()
    done = python(
        f"""
        import hf_memopt, torch
        args = torch.load({str(tmp_path / "checkpoint-2" / "training_args.bin")!r}, weights_only=False)
        print(args.optim.value, args.optim_args)
        """
    )
    assert done.stdout.split() == ["taco_adamw", "None"]


def test_set_optimizer(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True).set_optimizer(
        name="taco_adamw", learning_rate=3e-4, weight_decay=0.2, beta1=0.8, beta2=0.95, epsilon=1e-6, args="seed=2"
    )
    _, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert (kwargs["lr"], kwargs["betas"], kwargs["eps"], kwargs["seed"]) == (3e-4, (0.8, 0.95), 1e-6, 2)


def test_other_names_go_where_they_went_before(tmp_path):
    t = trainer(tmp_path, optim="adamw_torch", max_steps=1)
    t.train()
    assert type(inner(t.optimizer)) is torch.optim.AdamW


# -- when the private parts have moved ------------------------------------------------------------------------------


FUTURE = {
    "names are no enum": "training_args.OptimizerNames = ('adamw_torch', 'sgd')",
    "the enum is frozen": (
        "names = training_args.OptimizerNames; "
        "type.__setattr__(names, '_member_map_', __import__('types').MappingProxyType(dict(names._member_map_)))"
    ),
    "the name is taken": "training_args.OptimizerNames._member_map_['TACO_ADAMW'] = training_args.OptimizerNames.SGD",
}


@pytest.mark.parametrize("change", FUTURE.values(), ids=FUTURE.keys())
def test_failed_registration_warns_and_the_fallback_trains(change, tmp_path):
    done = python(
        f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from transformers import Trainer, TrainingArguments
        from transformers import training_args
        where = {str(tmp_path)!r}
        args = TrainingArguments(where, optim="sgd", optim_args="seed=5", max_steps=1, use_cpu=True, report_to=[])
        {change}
        import hf_memopt
        from tiny_llama import inner, texts, tiny_llama
        args.save_strategy = "no"
        model = tiny_llama()
        ours = hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, model)
        t = Trainer(model, args, train_dataset=texts(), optimizer_cls_and_kwargs=ours)
        t.train()
        print(type(inner(t.optimizer)).__name__, inner(t.optimizer).param_groups[0]["seed"])
        """
    )
    assert done.stdout.split()[-2:] == ["TacoAdamW", "5"]
    warnings = [line for line in done.stderr.splitlines() if "could not register its optimizer names" in line]
    assert len(warnings) == 1
    assert 'optimizer_cls_and_kwargs=hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, model)' in warnings[0]


# -- log lines ------------------------------------------------------------------------------------------------------


LOG = "import hf_memopt, logging; log = logging.getLogger('hf_memopt'); log.info('the table'); log.warning('careful')"


def test_log_lines_are_seen_by_default():
    assert python(LOG).stderr.splitlines() == ["hf_memopt: the table", "hf_memopt: careful"]


def test_log_lines_come_once_when_the_program_logs_itself():
    lines = python(f"import logging; logging.basicConfig(format='%(message)s'); {LOG}").stderr.splitlines()
    assert lines == ["the table", "careful"]


@pytest.mark.parametrize(("level", "lines"), [("warning", 1), ("silent", 0), ("DEBUG", 2)])
def test_verbosity(level, lines):
    assert len(python(LOG, HF_MEMOPT_VERBOSITY=level).stderr.splitlines()) == lines


def test_wrong_verbosity_is_refused():
    assert "is not a level: choose one of debug, info" in python(LOG, expect=1, HF_MEMOPT_VERBOSITY="loud").stderr
