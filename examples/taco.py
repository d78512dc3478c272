"""Fine-tune a causal language model, all parameters, with a small FP8 history and no gradient buffer.

    make assets                                                     # once: the demo's model and texts
    python examples/taco.py                                         # settings of configs/taco.yaml
    python examples/taco.py --optim taco --max_grad_norm 0          # the same with all gradients kept until the step
    python examples/taco.py --optim_args lr_scale=20

The program is that of taco_adamw.py beside this file; only the settings differ: bf16 weights, gradient checkpointing,
`optim: taco_layerwise`, which steps each parameter during backward and frees its gradient.
"""

from taco_adamw import main

if __name__ == "__main__":
    main("taco.yaml", dtype="bfloat16")
