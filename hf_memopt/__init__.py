"""Optimizer memory for the Hugging Face Trainer: ``import hf_memopt``, then ``optim="taco_adamw"``.

Importing the package registers its optimizer names with transformers, as soon as transformers itself is imported,
before or after. It imports nothing heavy: what is listed in ``__all__`` is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .integrations.trainer import register
from .integrations.verbosity import configure_logging
from .registry import OptimizerSpec, get_optimizer, list_optimizers

if TYPE_CHECKING:
    from .activations.compression import Compression
    from .activations.patch import compress_activations
    from .codecs.projected import Projection
    from .integrations.callbacks import MemoptCallback, MemoryReportCallback
    from .integrations.checkpoints import last_complete_checkpoint
    from .integrations.compact import CompActCallback
    from .integrations.kbit import prepare_for_kbit_training
    from .integrations.peft import LoraMemory, LoraMemoryCallback, compress_lora
    from .integrations.replace_galore import replace_builtin_galore
    from .integrations.trainer import optimizer_cls_and_kwargs
    from .optim import CompActAdamW, GaLoreAdamW, Taco, TacoAdamW, import_adamw_state
    from .optim.report import MemoryReport
    from .options import (
        CompActConfig,
        CompActOptions,
        CompActTacoOptions,
        GaLoreOptions,
        GaLoreTacoOptions,
        LoraMemoryConfig,
        TacoAdamWOptions,
        TacoOptions,
    )
    from .param_groups import build_param_groups
    from .parsing import parse_options

__version__ = "0.1.0"

_HOMES = {
    "CompActAdamW": ".optim",
    "CompActCallback": ".integrations.compact",
    "CompActConfig": ".options",
    "CompActOptions": ".options",
    "CompActTacoOptions": ".options",
    "Compression": ".activations.compression",
    "GaLoreAdamW": ".optim",
    "GaLoreOptions": ".options",
    "GaLoreTacoOptions": ".options",
    "LoraMemory": ".integrations.peft",
    "LoraMemoryCallback": ".integrations.peft",
    "LoraMemoryConfig": ".options",
    "MemoptCallback": ".integrations.callbacks",
    "MemoryReport": ".optim.report",
    "MemoryReportCallback": ".integrations.callbacks",
    "Projection": ".codecs.projected",
    "Taco": ".optim",
    "TacoAdamW": ".optim",
    "TacoAdamWOptions": ".options",
    "TacoOptions": ".options",
    "build_param_groups": ".param_groups",
    "compress_activations": ".activations.patch",
    "compress_lora": ".integrations.peft",
    "import_adamw_state": ".optim",
    "last_complete_checkpoint": ".integrations.checkpoints",
    "optimizer_cls_and_kwargs": ".integrations.trainer",
    "parse_options": ".parsing",
    "prepare_for_kbit_training": ".integrations.kbit",
    "replace_builtin_galore": ".integrations.replace_galore",
}

__all__ = [
    "CompActAdamW",
    "CompActCallback",
    "CompActConfig",
    "CompActOptions",
    "CompActTacoOptions",
    "Compression",
    "GaLoreAdamW",
    "GaLoreOptions",
    "GaLoreTacoOptions",
    "LoraMemory",
    "LoraMemoryCallback",
    "LoraMemoryConfig",
    "MemoptCallback",
    "MemoryReport",
    "MemoryReportCallback",
    "OptimizerSpec",
    "Projection",
    "Taco",
    "TacoAdamW",
    "TacoAdamWOptions",
    "TacoOptions",
    "__version__",
    "build_param_groups",
    "compress_activations",
    "compress_lora",
    "get_optimizer",
    "import_adamw_state",
    "last_complete_checkpoint",
    "list_optimizers",
    "optimizer_cls_and_kwargs",
    "parse_options",
    "prepare_for_kbit_training",
    "replace_builtin_galore",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


configure_logging()
register()
