"""Fine-tune a causal language model, all parameters, with AdamW in a low-rank subspace of each linear layer's gradient.

    make assets                                                     # once: the demo's model and texts
    python examples/galore.py                                       # settings of configs/memopt_galore_adamw.yaml
    python examples/galore.py --optim galore_taco_adamw             # the same with ternary moments
    python examples/galore.py configs/galore_taco_adamw.yaml --optim_args rank=128,scale=0.25
    python examples/galore.py --optim galore_taco_adamw_layerwise --max_grad_norm 0   # and without a gradient buffer

The program is that of taco_adamw.py beside this file; only the settings differ. The table at the end says which
matrices are projected and which are not, and why.
"""

from taco_adamw import main

if __name__ == "__main__":
    main("memopt_galore_adamw.yaml")
