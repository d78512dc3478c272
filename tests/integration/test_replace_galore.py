"""``hf_memopt.replace_builtin_galore()``: transformers' GaLore names in the Trainer, without galore-torch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from tiny_llama import arguments, differences, inner, snapshot, tiny_llama, trainer
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_memopt
from hf_memopt import GaLoreAdamW
from hf_memopt.registry import is_registered

NAMES = ("galore_adamw", "galore_adamw_8bit", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise")
RANK = "rank=16, update_proj_gap=2"
TARGETS = [r".*.attn.*", r".*.mlp.*"]  # as transformers' documentation writes them


@pytest.fixture
def replaced():
    with hf_memopt.replace_builtin_galore():
        yield


def galore(tmp_path, optim="galore_adamw", **changes):
    settings = {"optim": optim, "optim_args": RANK, "optim_target_modules": TARGETS}
    if optim.endswith("layerwise"):
        settings["max_grad_norm"] = 0.0
    return trainer(tmp_path, **{**settings, **changes})


@pytest.mark.parametrize("optim", NAMES)
def test_a_configuration_of_transformers_trains_and_resumes(optim, tmp_path, replaced):
    t = galore(tmp_path, optim, weight_decay=0.3, adam_beta2=0.95)
    t.train()
    optimizer = inner(t.optimizer)
    assert type(optimizer) is GaLoreAdamW
    assert optimizer.update_in_backward == optim.endswith("layerwise")
    projected = [group for group in optimizer.param_groups if group["treatment"] == "projected"]
    names = {name for group in projected for name in group["param_names"]}
    assert names == {n for n, _ in t.model.named_parameters() if "attn" in n or "mlp" in n}
    for group in projected:
        assert group["state"] == ("ternary" if "8bit" in optim else "fp32")
        assert [group[key] for key in ("rank", "update_proj_gap", "scale", "proj_type")] == [16, 2, 0.25, "std"]
        assert (group["betas"], group["weight_decay"]) == ((0.9, 0.95), 0.3)
    losses = [entry["loss"] for entry in t.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    again = galore(tmp_path, optim, weight_decay=0.3, adam_beta2=0.95)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert differences(snapshot(t), snapshot(again)) == []


def test_the_defaults_are_those_of_the_installed_transformers(tmp_path, monkeypatch, replaced):
    """transformers' own code fills them in; of galore-torch it only wants to import the classes' names."""
    import types

    from transformers import Trainer

    module = types.ModuleType("galore_torch")
    for name in ("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor"):
        setattr(module, name, type(name, (torch.optim.SGD,), {}))
    monkeypatch.setitem(sys.modules, "galore_torch", module)
    owner = sys.modules[Trainer.get_optimizer_cls_and_kwargs.__wrapped__.__module__]
    for holder in (owner, sys.modules.get("transformers.trainer_optimizer")):
        if holder is not None and hasattr(holder, "is_galore_torch_available"):
            monkeypatch.setattr(holder, "is_galore_torch_available", lambda: True)
    args = arguments(tmp_path, optim="galore_adamw", optim_target_modules="all-linear")
    _, theirs = Trainer.get_optimizer_cls_and_kwargs.__wrapped__(args, tiny_llama())
    (group,) = (g for g in theirs["params"] if "rank" in g)
    expected = {key: group[key] for key in ("rank", "update_proj_gap", "scale", "proj_type")}
    for name in NAMES:
        options = hf_memopt.parse_options(hf_memopt.get_optimizer(name).options, None)
        assert {key: getattr(options, key) for key in expected} == expected


def test_options_of_ours_may_be_added(tmp_path, replaced):
    optimizer = galore(tmp_path, optim_args="rank=0.25,refresh=random,residual=fira,seed=3").create_optimizer()
    group = next(g for g in optimizer.param_groups if g["treatment"] == "projected")
    assert [group[k] for k in ("rank", "refresh", "residual", "seed", "scale")] == [0.25, "random", "fira", 3, 0.25]


@pytest.mark.parametrize("optim", NAMES)
@pytest.mark.parametrize(
    ("optim_args", "sentence"),
    [
        ("ranks=64", "there is no option 'ranks'; the options are .*rank: "),
        ("rank=many", "option 'rank' must be int or float, got 'many'"),
        ("rank=16,proj_type=full", "proj_type=full, which projects both dimensions, is not supported: set proj_type="),
        ("rank=128", "No parameter would be projected at rank=128 .*choose another rank .* train with taco_adamw"),
    ],
)
def test_what_is_wrong_is_said(optim, optim_args, sentence, tmp_path, replaced):
    with pytest.raises(ValueError, match=sentence) as error:
        galore(tmp_path, optim, optim_args=optim_args).create_optimizer()
    assert "\n" not in str(error.value)


def test_a_layerwise_name_refuses_what_it_cannot_do(tmp_path, replaced):
    with pytest.raises(ValueError, match="optim='galore_adamw_layerwise' .* gradient_accumulation_steps=2"):
        galore(tmp_path, "galore_adamw_layerwise", gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="optim='galore_adamw_8bit_layerwise' .* set max_grad_norm=0"):
        galore(tmp_path, "galore_adamw_8bit_layerwise", max_grad_norm=1.0)


def test_the_names_are_replaced_once_and_come_back(tmp_path, monkeypatch):
    assert not any(map(is_registered, NAMES))
    first = hf_memopt.replace_builtin_galore()
    with hf_memopt.replace_builtin_galore():
        assert all(map(is_registered, NAMES))
    assert all(map(is_registered, NAMES)), "the block inside did not replace anything, so it gives nothing back"
    first.close()
    assert not any(map(is_registered, NAMES))
    first.close()
    with hf_memopt.replace_builtin_galore():
        assert isinstance(galore(tmp_path).create_optimizer(), GaLoreAdamW)
    assert [o.name for o in hf_memopt.list_optimizers() if o.name.startswith("galore_adam")] == []


def test_adafactor_stays_transformers_and_so_do_the_enum_and_the_parser(tmp_path, replaced):
    assert not is_registered("galore_adafactor") and not is_registered("galore_adafactor_layerwise")
    assert list(OptimizerNames).count(OptimizerNames("galore_adamw")) == 1
    line = ["--output_dir", str(tmp_path), "--optim", "galore_adamw", "--use_cpu", "true"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(line)
    assert args.optim is OptimizerNames.GALORE_ADAMW


WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("galore_torch", "bitsandbytes", "tensorly"):
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

asked = []
sys.meta_path.insert(0, Missing())
import hf_memopt
from tests.integration.tiny_llama import inner, trainer
import tempfile

def train(optim):
    settings = {"optim_args": "rank=16", "optim_target_modules": ["mlp"], "max_steps": 1, "save_strategy": "no"}
    if optim.endswith("layerwise"):
        settings["max_grad_norm"] = 0.0
    try:
        with tempfile.TemporaryDirectory() as folder:
            t = trainer(folder, optim=optim, **settings)
            t.train()
            print(optim, type(inner(t.optimizer)).__name__)
    except ImportError:
        print(optim, "ImportError")

train("memopt_galore_adamw")
train("galore_taco_adamw_layerwise")
with hf_memopt.replace_builtin_galore():
    train("galore_adamw")
    train("galore_adamw_8bit")
assert not {name.split(".")[0] for name in asked} & {"galore_torch", "tensorly"}, asked
train("galore_adamw")
print(sorted({"galore_torch", "bitsandbytes", "tensorly"} & set(sys.modules)))
"""


def test_neither_galore_torch_nor_bitsandbytes_nor_tensorly_is_imported():
    """In a process in which they cannot be. Without the call ``galore_adamw`` is transformers' and asks for them."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if re.match(r"\w*galore|\[", line)]
    assert lines == [
        "memopt_galore_adamw GaLoreAdamW",
        "galore_taco_adamw_layerwise GaLoreAdamW",
        "galore_adamw GaLoreAdamW",
        "galore_adamw_8bit GaLoreAdamW",
        "galore_adamw ImportError",
        "[]",
    ]
