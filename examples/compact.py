"""Fine-tune a causal language model, all parameters, with compressed activations and recomputed norms and MLPs.

    make assets                                                   # once: the demo's model and texts
    python examples/compact.py                                    # settings of configs/compact_adamw.yaml
    python examples/compact.py --optim compact_taco_adamw         # the same with ternary moments
    python examples/compact.py configs/compact_taco_adamw.yaml --optim_args rank=0.5,projection=orthonormal
    python examples/compact.py --optim compact_taco_adamw_layerwise --max_grad_norm 0   # and without a gradient buffer

The program is that of taco_adamw.py beside this file; only the settings differ. The log after the first step says which
layers keep compressed inputs, which of them share one, and what was left alone and why. For any other optimizer give
the Trainer callbacks=[hf_memopt.CompActCallback(hf_memopt.CompActConfig(rank=0.25))].
"""

from taco_adamw import main

if __name__ == "__main__":
    main("compact_adamw.yaml")
