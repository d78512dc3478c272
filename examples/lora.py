"""Fine-tune adapters of a causal language model with LoRA or QLoRA, and a third of PEFT's activation memory.

    make assets                                           # once: the demo's model and texts
    python examples/lora.py                               # LoRA on a bf16 model, exact tier
    python examples/lora.py --load_in_4bit                # QLoRA: nf4, quantised twice (needs bitsandbytes)
    python examples/lora.py --tier compressed --recompute none --lora_dropout 0.05
    python examples/lora.py --tier off                    # plain PEFT, to compare with

Any TrainingArguments can stand on the command line. The last of the text files, in the order of their names, are held
out and judged before and after. The adapter is saved as PEFT saves it, and any PEFT loads it.
"""

import pathlib
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from taco_adamw import ScriptArguments, read_blocks
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser, Trainer
from transformers import TrainingArguments as Arguments

from hf_memopt import LoraMemoryCallback, LoraMemoryConfig, prepare_for_kbit_training


@dataclass
class LoraArguments(ScriptArguments):
    dtype: str = "bfloat16"  # of the weights that are not quantised
    load_in_4bit: bool = False
    r: int = 16
    lora_dropout: float = 0.0
    tier: str = "exact"  # or compressed, or off
    recompute: str = "norms,mlp"


def main() -> None:
    parser = HfArgumentParser((LoraArguments, Arguments))
    parser.set_defaults(
        output_dir="output/lora", learning_rate=5e-4, max_steps=40, per_device_train_batch_size=2, logging_steps=5,
        save_strategy="no", report_to=[],
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    dtype = getattr(torch, script.dtype)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        script.model_name_or_path, dtype=dtype, quantization_config=quantised if script.load_in_4bit else None
    )
    model = prepare_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(
        r=script.r, lora_dropout=script.lora_dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)

    files = sorted(pathlib.Path(script.text_dir).glob("*.txt"))
    if not files:
        raise SystemExit(f"There is no text in {script.text_dir}: `make assets`.")
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    held_out = read_blocks(files[-script.held_out_files :], tokenizer, script.block_tokens, "held-out")
    training = read_blocks(files[: -script.held_out_files], tokenizer, script.block_tokens, "training")
    held_out = held_out[: script.held_out_blocks]

    memory = None
    if script.tier != "off":
        memory = LoraMemoryCallback(LoraMemoryConfig(tier=script.tier, recompute=script.recompute))
    trainer = Trainer(model, args, train_dataset=training, eval_dataset=held_out, callbacks=[memory] if memory else [])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    model.save_pretrained(args.output_dir)
    if memory:
        print(memory.handle.report().table())
    print(f"held-out loss: {before:.4f} -> {after:.4f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
