"""What must hold under every supported transformers; run by ``run_compat.py``. Prints one line of JSON last."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import platform
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from tiny_llama import arguments, differences, inner, snapshot, texts, tiny_llama, trainer
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

import hf_memopt
from hf_memopt.integrations.checkpoints import why_not_whole


def names(tmp: Path) -> None:
    member = OptimizerNames("taco_adamw")
    assert list(OptimizerNames).count(member) == 1 and pickle.loads(pickle.dumps(member)) is member
    args = arguments(tmp)
    assert args.optim is member and args.to_dict()["optim"] == "taco_adamw"
    torch.save(args, tmp / "args.bin")
    assert torch.load(tmp / "args.bin", weights_only=False).optim is member


def command_line(tmp: Path) -> None:
    parser = HfArgumentParser(TrainingArguments)
    line = ["--output_dir", str(tmp), "--optim", "taco_adamw", "--optim_args", "seed=7", "--use_cpu", "true"]
    (args,) = parser.parse_args_into_dataclasses(line)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, tiny_llama())
    assert (cls.__name__, kwargs["seed"]) == ("TacoAdamW", 7)


def typo(tmp: Path) -> None:
    for changes in ({"optim": "tako"}, {"optim_args": "sead=1"}):
        try:
            trainer(tmp, **changes).create_optimizer()
        except ValueError as error:
            assert "taco_adamw" in str(error)
        else:
            raise AssertionError(f"{changes} was accepted")


def weight_decay_groups(tmp: Path) -> None:
    def decays(optim: str) -> dict[str, float]:
        t = trainer(tmp, optim=optim)
        name_of = {id(p): name for name, p in t.model.named_parameters()}
        return {name_of[id(p)]: g["weight_decay"] for g in t.create_optimizer().param_groups for p in g["params"]}

    assert decays("taco_adamw") == decays("adamw_torch")


def another_optimizer(tmp: Path) -> None:
    t = trainer(tmp, optim="adamw_torch", max_steps=2)
    t.train()
    assert type(inner(t.optimizer)) is torch.optim.AdamW
    trainer(tmp, optim="adamw_torch", max_steps=4).train(resume_from_checkpoint=str(tmp / "checkpoint-2"))


def resume(tmp: Path, dtype: torch.dtype) -> None:
    straight = trainer(tmp, dtype=dtype)
    straight.train()
    assert [why_not_whole(tmp / f"checkpoint-{n}") for n in (2, 4, 6)] == [None] * 3
    os.remove(tmp / "checkpoint-6" / "optimizer.pt")
    last = hf_memopt.last_complete_checkpoint(tmp)
    assert last == str(tmp / "checkpoint-4")
    again = trainer(tmp, dtype=dtype)
    again.train(resume_from_checkpoint=last)
    assert differences(snapshot(straight), snapshot(again)) == []
    assert hf_memopt.last_complete_checkpoint(tmp) == str(tmp / "checkpoint-6")


def resume_fp32(tmp: Path) -> None:
    resume(tmp, torch.float32)


def resume_bf16(tmp: Path) -> None:
    resume(tmp, torch.bfloat16)


def torn_checkpoint_and_save_total_limit(tmp: Path) -> None:
    trainer(tmp, max_steps=2).train()
    shutil.copytree(tmp / "checkpoint-2", tmp / "checkpoint-90")
    os.remove(tmp / "checkpoint-90" / "trainer_state.json")
    t = trainer(tmp, max_steps=6, save_total_limit=1)
    t.train(resume_from_checkpoint=hf_memopt.last_complete_checkpoint(tmp))
    assert hf_memopt.last_complete_checkpoint(tmp) == str(tmp / "checkpoint-6")


def figures_in_the_logs(tmp: Path) -> None:
    t = trainer(tmp, report_to=["hf_memopt"], save_strategy="no")
    t.train()
    logged = [entry for entry in t.state.log_history if "loss" in entry]
    assert len(logged) == 6
    assert all(entry["memopt/state_bytes"] > 0 and 0 < entry["memopt/zero_share"] < 1 for entry in logged)


def fallback(tmp: Path) -> None:
    args, model = arguments(tmp, optim="sgd", max_steps=1), tiny_llama()
    ours = hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, model)
    t = Trainer(model, args, train_dataset=texts(), optimizer_cls_and_kwargs=ours)
    t.train()
    assert type(inner(t.optimizer)).__name__ == "TacoAdamW"


def update_in_backward(tmp: Path) -> None:
    plain = trainer(tmp / "plain", save_strategy="no", max_grad_norm=1e9)
    ours = trainer(tmp / "ours", optim="taco_adamw_layerwise", max_grad_norm=0.0)
    plain.train()
    ours.train()
    assert differences(snapshot(plain), snapshot(ours)) == []
    norms = [[e["grad_norm"] for e in t.state.log_history if "grad_norm" in e] for t in (plain, ours)]
    assert len(norms[0]) == 6 and all(abs(a - b) < 1e-4 * a for a, b in zip(*norms, strict=True))
    again = trainer(tmp / "ours", optim="taco_adamw_layerwise", max_grad_norm=0.0)
    again.train(resume_from_checkpoint=str(tmp / "ours" / "checkpoint-4"))
    assert differences(snapshot(ours), snapshot(again)) == []


def taco(tmp: Path) -> None:
    straight = trainer(tmp, optim="taco", dtype=torch.bfloat16)
    straight.train()
    again = trainer(tmp, optim="taco", dtype=torch.bfloat16)
    again.train(resume_from_checkpoint=str(tmp / "checkpoint-2"))
    assert differences(snapshot(straight), snapshot(again)) == []


def galore(tmp: Path) -> None:
    settings = {"optim": "memopt_galore_adamw", "optim_args": "rank=16,update_proj_gap=3,refresh=subspace"}
    settings["optim_target_modules"] = [r".*.attn.*", r".*.mlp.*"]
    plain = trainer(tmp / "plain", **settings, weight_decay=0.3, max_grad_norm=1e9)
    plain.train()
    groups = inner(plain.optimizer).param_groups
    projected = {name for g in groups if g["treatment"] == "projected" for name in g["param_names"]}
    assert projected == {n for n, _ in plain.model.named_parameters() if "attn" in n or "mlp" in n}
    assert {g["weight_decay"] for g in groups} == {0.0, 0.3}
    again = trainer(tmp / "plain", **settings, weight_decay=0.3, max_grad_norm=1e9)
    again.train(resume_from_checkpoint=str(tmp / "plain" / "checkpoint-2"))
    assert differences(snapshot(plain), snapshot(again)) == []


def galore_layerwise(tmp: Path) -> None:
    settings = {"optim_args": "rank=16,update_proj_gap=3,refresh=subspace", "lr_scheduler_type": "cosine"}
    plain = trainer(tmp / "plain", optim="memopt_galore_adamw", **settings, save_strategy="no", max_grad_norm=1e9)
    ours = trainer(tmp / "ours", optim="memopt_galore_adamw_layerwise", **settings, max_grad_norm=0.0)
    plain.train()
    ours.train()
    assert differences(snapshot(plain), snapshot(ours)) == []
    for key, tolerance in (("grad_norm", 1e-4), ("learning_rate", 0.0)):
        logged = [[e[key] for e in t.state.log_history if key in e] for t in (plain, ours)]
        assert len(logged[0]) == 6 and all(abs(a - b) <= tolerance * a for a, b in zip(*logged, strict=True))
    again = trainer(tmp / "ours", optim="memopt_galore_adamw_layerwise", **settings, max_grad_norm=0.0)
    again.train(resume_from_checkpoint=str(tmp / "ours" / "checkpoint-4"))
    assert differences(snapshot(ours), snapshot(again)) == []


def replaced_galore(tmp: Path) -> None:
    """transformers' own names, without galore-torch."""
    settings = {"optim_args": "rank=16, update_proj_gap=3", "optim_target_modules": ["attn", "mlp"]}
    with hf_memopt.replace_builtin_galore():
        for optim, state in (("galore_adamw", "fp32"), ("galore_adamw_8bit_layerwise", "ternary")):
            clip = 0.0 if optim.endswith("layerwise") else 1.0
            t = trainer(tmp / optim, optim=optim, **settings, max_grad_norm=clip, save_strategy="no")
            t.train()
            (group,) = (g for g in inner(t.optimizer).param_groups if g["treatment"] == "projected")
            assert [group[key] for key in ("rank", "update_proj_gap", "scale", "state")] == [16, 3, 0.25, state]


def compact(tmp: Path) -> None:
    """Patched by its name and by the callback; a checkpoint is the plain model's, and resumes with its subspaces."""
    settings = {"optim_args": "rank=0.25,update_proj_gap=3,recompute=norms,mlp"}
    straight = trainer(tmp / "named", optim="compact_adamw", **settings)
    keys = list(straight.model.state_dict())
    straight.train()
    assert list(straight.model.state_dict()) == keys
    again = trainer(tmp / "named", optim="compact_adamw", **settings)
    again.train(resume_from_checkpoint=str(tmp / "named" / "checkpoint-4"))
    assert differences(snapshot(straight), snapshot(again)) == []

    def with_callback() -> Trainer:
        args = arguments(tmp / "callback", optim="adamw_torch")
        config = hf_memopt.CompActConfig(rank=0.25, update_proj_gap=3)
        return Trainer(tiny_llama(), args, train_dataset=texts(), callbacks=[hf_memopt.CompActCallback(config)])

    straight, again = with_callback(), with_callback()
    straight.train()
    again.train(resume_from_checkpoint=str(tmp / "callback" / "checkpoint-4"))
    assert differences(snapshot(straight), snapshot(again)) == []


CHECKS = [
    names,
    command_line,
    typo,
    weight_decay_groups,
    another_optimizer,
    resume_fp32,
    resume_bf16,
    torn_checkpoint_and_save_total_limit,
    figures_in_the_logs,
    fallback,
    update_in_backward,
    taco,
    galore,
    galore_layerwise,
    replaced_galore,
    compact,
]


def main() -> int:
    torch.set_num_threads(1)
    outcome = {}
    for check in CHECKS:
        with tempfile.TemporaryDirectory() as tmp:
            try:
                check(Path(tmp))
                outcome[check.__name__] = "passed"
            except Exception:
                outcome[check.__name__] = traceback.format_exc()
    passed = all(result == "passed" for result in outcome.values())
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    print("\n" + json.dumps({"passed": passed, "python": platform.python_version(), **versions, "checks": outcome}))
    return not passed


if __name__ == "__main__":
    sys.exit(main())
