"""The optimizers: who updates. Each is a plain ``torch.optim.Optimizer``, usable without the Trainer."""

from .import_adamw import import_adamw_state
from .taco import Taco
from .taco_adamw import TacoAdamW

__all__ = ["Taco", "TacoAdamW", "import_adamw_state"]
