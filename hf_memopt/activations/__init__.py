"""What the forward pass keeps for the backward pass: less of it, exactly (recomputed) or nearly (compressed).

``remade.py`` knows how to make a tensor again, so that a layer that reads it keeps what it was made from, which is
kept anyway; ``recompute.py`` patches the norms, activation functions and gated MLPs of a model, whose outputs can be
made again.
"""
