"""The optimizers: who updates. Each is a plain ``torch.optim.Optimizer``, usable without the Trainer."""

from .compact import CompActAdamW
from .galore import GaLoreAdamW
from .import_adamw import import_adamw_state
from .taco import Taco
from .taco_adamw import TacoAdamW

__all__ = ["GaLoreAdamW", "Taco", "TacoAdamW", "import_adamw_state"]
