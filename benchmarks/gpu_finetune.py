"""The fine-tune of `benchmarks.gpu`: the unmodified Trainer, the same batches with each optimizer.

The model is SmolLM2-135M on State of the Union addresses where the demo's assets are, else a byte-level Llama on the
source of Python's standard library, which is real text and on every machine.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import statistics
import tempfile
from typing import Any

import torch

from benchmarks.common import state_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def finetune(place: Any) -> dict[str, Any]:
    """SmolLM2-135M on the sotu task where the demo's assets are, else a byte-level Llama on Python's own source."""
    steps = place.sizes(60, 3)
    task = sotu(steps) if place.cuda and assets_present() else python_source(place, steps)
    rows = []
    peer = "adamw_torch_fused" if place.cuda else "adamw_torch"
    for optim in ("taco_adamw", peer, "adamw_bnb_8bit", "taco_adamw_layerwise", "taco_layerwise"):
        if "bnb" in optim and importlib.util.find_spec("bitsandbytes") is None:
            rows.append({"optim": optim, "skipped": "bitsandbytes is not installed"})
            continue
        for name, dtype in DTYPES.items() if place.cuda else [("fp32", torch.float32)]:
            reason = place.late("finetune")
            result = {"skipped": reason} if reason else fine_tune_once(place, task, optim, dtype)
            rows.append({"optim": optim, "dtype": name} | result)
            print(f"  {rows[-1]}", flush=True)
            place.clean()
    return {"task": task["name"], "steps": steps, "rows": rows}


def assets_present() -> bool:
    from tools.demo_assets import demo_dir

    return all((demo_dir() / name).exists() for name in ("smollm2-135m", "sotu"))


def sotu(steps: int) -> dict[str, Any]:
    from benchmarks import sotu_lm

    return {
        "name": "SmolLM2-135M on State of the Union addresses",
        "model": sotu_lm.load_model,
        "train": sotu_lm.training_blocks(0, steps),
        "evaluate": sotu_lm.evaluate,
        "arguments": sotu_lm.training_arguments(steps) | {"learning_rate": 1e-4},
    }


def python_source(place: Any, steps: int) -> dict[str, Any]:
    """Real text that is on every machine: the standard library's source, in bytes. Every twelfth module is held out."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    modules = sorted(pathlib.Path(json.__file__).parent.parent.glob("*.py"))[: place.sizes(None, 12)]
    texts = {held: b"".join(p.read_bytes() for i, p in enumerate(modules) if (i % 12 == 5) == held)
             for held in (False, True)}  # fmt: skip
    length, batch = place.sizes(512, 32), place.sizes(16, 2)
    blocks = {held: torch.frombuffer(bytearray(text[: len(text) // length * length]), dtype=torch.uint8)
              .long().view(-1, length) for held, text in texts.items()}  # fmt: skip
    order = torch.randperm(len(blocks[False]), generator=torch.Generator().manual_seed(0))[: steps * batch]
    shape = place.sizes(
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2},
    )

    def model(dtype: torch.dtype) -> torch.nn.Module:
        set_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape)).to(dtype)

    @torch.no_grad()
    def evaluate(trained: torch.nn.Module) -> float:
        trained.eval()
        chosen = blocks[True][: place.sizes(64, 4)].to(trained.device)
        losses = [trained(input_ids=b, labels=b).loss.float().item() for b in chosen.split(4)]
        return statistics.mean(losses)

    return {
        "name": "byte-level Llama on the standard library's source, from scratch",
        "model": model,
        "train": [{"input_ids": blocks[False][i], "labels": blocks[False][i]} for i in order.tolist()],
        "evaluate": evaluate,
        "arguments": {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": 1e-3,
                      "lr_scheduler_type": "cosine", "warmup_steps": 6, "weight_decay": 0.0},
    }  # fmt: skip


def fine_tune_once(place: Any, task: dict, optim: str, dtype: torch.dtype) -> dict[str, Any]:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model = task["model"](dtype).to(place.device)
    result: dict[str, Any] = {"before": task["evaluate"](model)}
    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(
            output_dir=scratch, optim=optim, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=not place.cuda, seed=0, data_seed=0,
            **task["arguments"] | ({"max_grad_norm": 0.0} if optim.endswith("_layerwise") else {}),
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=task["train"])
        trainer.remove_callback(PrinterCallback)
        result["peak_bytes_above_the_model"] = place.peak_bytes(lambda: result.update(train=trainer.train().metrics))
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    result |= {
        "after": task["evaluate"](model),
        "curve": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "train_seconds": result.pop("train")["train_runtime"],
        "state_bytes": state_bytes(inner),
        "skipped_steps": getattr(inner, "skipped_steps", 0),
        "kernel": inner.kernel_name() if hasattr(inner, "kernel_name") else None,
    }
    return result
