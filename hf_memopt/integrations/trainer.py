"""The package's optimizers as values of ``TrainingArguments.optim``.

transformers has no way to register an optimizer by name, so three things are added to it, the same on every supported
version:

- ``OptimizerNames``, the enum that ``TrainingArguments`` converts ``optim`` with and ``HfArgumentParser`` takes its
  choices from, gets one member per name;
- the public static method ``Trainer.get_optimizer_cls_and_kwargs`` is wrapped: our names go to our builders, all
  others where they went before;
- the public method ``Trainer.save_model``, with which every save into a checkpoint folder begins, is wrapped: it takes
  away the mark of an earlier save in that folder first (see ``checkpoints.py``).

(transformers 5 also has a private table of handlers. It is not used: by then ``optim_args`` has been split by code
that answers a typing mistake with "not enough values to unpack".)

The first two are tried out right after they are made. If a later transformers has moved them, one warning says so and
names the way that needs neither:
``Trainer(optimizer_cls_and_kwargs=hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, model))``.

Not reachable from here: a Trainer subclass that overrides ``get_optimizer_cls_and_kwargs`` or ``create_optimizer``
without calling the original (or ``save_model``: then only sizes and fingerprints tell a half overwritten checkpoint),
and a subclass's own ``get_decay_parameter_names`` (the static method has no instance to ask; the Trainer's rule is
used).
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
from types import ModuleType
from typing import Any

from ..options import LoraMemoryConfig
from ..parsing import parse_options
from ..registry import get_optimizer, is_registered, list_optimizers
from .checkpoints import remove_marker
from .import_hooks import after_import

logger = logging.getLogger("hf_memopt")

WRAPPED = "_hf_memopt_wrapped"


def register() -> None:
    """Teach transformers the package's names, each part when its module is imported. May be called more than once."""
    after_import("transformers.training_args", add_optimizer_names)
    after_import("transformers.trainer", add_to_trainer)
    after_import("transformers.integrations.integration_utils", add_reporter)


# -- what a training asks for ------------------------------------------------------------------------------------------


def optimizer_cls_and_kwargs(name: str, args: Any, model: Any = None) -> tuple[type, dict[str, Any]]:
    """Optimizer class and keyword arguments for training ``model`` with ``args``, as ``Trainer`` takes them.

    This is what ``optim="taco_adamw"`` calls. It can be given to the Trainer directly, which needs no registration:
    ``Trainer(model, args, optimizer_cls_and_kwargs=hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, model))``.

    Args:
        name: An optimizer of this package; see ``list_optimizers()``.
        args: ``TrainingArguments``. Learning rate, betas, eps and weight decay are read as for ``adamw_torch``;
            ``optim_args`` and ``optim_target_modules`` too.
        model: The model whose trainable parameters are optimized. Without it the Trainer's own two groups are kept,
            and options that need the model raise.

    Raises:
        ValueError: An unknown name, or wrong options.
        NotImplementedError: The run asks for something that the optimizers do not support yet; the sentence says what
            to do instead.
    """
    refuse_unsupported(name, args)
    options = _options(name, args)
    if options.update_in_backward:
        refuse_in_backward(f"optim={name!r}", args)
    if options.lora_memory != "none":
        _compress_adapters(name, model, options.lora_memory)
    return get_optimizer(name).load_builder()(
        model,
        options,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        no_decay=no_decay_names(model) if model is not None else (),
        target_modules=getattr(args, "optim_target_modules", None),
    )


def _compress_adapters(name: str, model: Any, tier: str) -> None:
    """What ``lora_memory=...`` in ``optim_args`` asks for."""
    if model is None:
        raise ValueError(f"{name}: lora_memory={tier} changes the model's adapters, so pass the model as well.")
    try:
        from .peft import in_force
    except ImportError as error:
        raise ImportError(f"{name}: lora_memory={tier} needs peft ({error}): pip install peft.") from error
    try:
        in_force(model, LoraMemoryConfig(tier=tier))
    except ValueError as error:
        raise ValueError(f"{name}: lora_memory={tier} is not possible. {error}") from None


def no_decay_names(model: Any) -> set[str]:
    """Names of the trainable parameters that the installed transformers exempts from weight decay."""
    from transformers import Trainer

    # an instance method that uses no instance; the rule differs between versions, so it is asked and not copied
    decay = set(Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model))
    return {name for name, p in model.named_parameters() if p.requires_grad and name not in decay}


def refuse_unsupported(name: str, args: Any) -> None:
    """Raise NotImplementedError, in one sentence, for a way of training that the optimizers do not support yet."""
    for argument, flag, what in _UNSUPPORTED:
        asked = bool(argument and getattr(args, argument, None))
        if asked or os.environ.get(flag, "false").lower() in ("1", "true", "yes"):
            # accelerate sets the flag for the whole process, so it outlives the Trainer that was meant
            source = (
                ""
                if asked
                else f"; the environment variable {flag} asks for it, set by the launcher or by an earlier Trainer or "
                f"Accelerator of this process: unset {flag} if this run is not meant to use it"
            )
            raise NotImplementedError(f"optim={name!r} does not support {what}{source}.")
    mode = getattr(getattr(args, "parallel_mode", None), "name", "")
    if mode in _UNSUPPORTED_MODES:
        raise NotImplementedError(f"optim={name!r} does not support {_UNSUPPORTED_MODES[mode]}.")


def updates_in_backward(name: str, args: Any) -> bool:
    """Whether ``optim=name`` with these arguments would update during backward; False where options are wrong, which
    is said when the optimizer is made."""
    try:
        return _options(name, args).update_in_backward
    except ValueError:
        return False


def _options(name: str, args: Any) -> Any:
    """The options of ``optim=name`` in ``args``. Raises ValueError for a wrong name or wrong options."""
    spec = get_optimizer(name)
    return parse_options(spec.options, getattr(args, "optim_args", None), strategy=name, preset=spec.preset)


def refuse_in_backward(who: str, args: Any) -> None:
    """Raise ValueError, in one sentence, for training arguments that an update during backward cannot honour."""
    fp16 = getattr(args, "fp16", False) or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16"
    clips = args.max_grad_norm is not None and args.max_grad_norm > 0
    mode = getattr(getattr(args, "parallel_mode", None), "name", "")
    reasons = (
        (
            args.gradient_accumulation_steps > 1,
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: each gradient is applied and freed at "
            "once; set gradient_accumulation_steps=1 (and a smaller learning rate), or train without it",
        ),
        (
            clips,
            f"max_grad_norm={args.max_grad_norm}: the norm of all gradients is known only when all have been applied; "
            'set max_grad_norm=0, and optim_args="clip_per_parameter=1.0" to clip each parameter by itself',
        ),
        (fp16, "fp16 with its gradient scaler: set bf16=True, or fp16=False and unset ACCELERATE_MIXED_PRECISION"),
        (
            mode == "NOT_DISTRIBUTED" and getattr(args, "n_gpu", 1) > 1,
            "several GPUs in one process (DataParallel): show it one with CUDA_VISIBLE_DEVICES, or train without it",
        ),
        (
            mode == "DISTRIBUTED",
            "several processes: a gradient would be applied before it is averaged over them; train in one process, or "
            "without it",
        ),
        (
            getattr(args, "auto_find_batch_size", False),
            "auto_find_batch_size: an attempt that runs out of memory has changed part of the weights already; set "
            "per_device_train_batch_size yourself",
        ),
    )
    asked = [what for is_asked, what in reasons if is_asked]
    if asked:
        raise ValueError(f"{who} with update in backward does not support {'; nor '.join(asked)}.")


# training argument, flag with which accelerate passes it on, what is not supported
_UNSUPPORTED = (
    (
        "deepspeed",
        "ACCELERATE_USE_DEEPSPEED",
        "DeepSpeed yet, which hands optimizers flattened parameters: train without it, with DDP on several GPUs, or "
        "use adamw_torch",
    ),
    (
        "fsdp",
        "ACCELERATE_USE_FSDP",
        "FSDP yet: train without it, with DDP if the model fits on each GPU, or use adamw_torch",
    ),
    (None, "ACCELERATE_USE_MEGATRON_LM", "Megatron-LM: train without it or use adamw_torch"),
    (
        "parallelism_config",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        "tensor, context or sequence parallelism yet: train without parallelism_config or use adamw_torch",
    ),
)
_UNSUPPORTED_MODES = {
    "SAGEMAKER_MODEL_PARALLEL": "SageMaker model parallelism: train without it or use adamw_torch",
    "TPU": "TPUs: train on the CPU or CUDA or use adamw_torch_xla",
}


# -- what is added to transformers -------------------------------------------------------------------------------------


def add_optimizer_names(training_args: ModuleType) -> None:
    """Add the registered names to ``OptimizerNames`` and try them out."""
    try:
        for spec in list_optimizers():
            _extend_str_enum(training_args.OptimizerNames, spec.name.upper(), spec.name)
        _check_names(training_args.OptimizerNames)
    except Exception as error:
        _warn_registration_failed(error)


def add_to_trainer(trainer: ModuleType) -> None:
    """Route the registered names to their builders and give every Trainer the package's callback."""
    from .callbacks import MemoptCallback

    try:
        _wrap_get_optimizer(trainer.Trainer)
    except Exception as error:
        _warn_registration_failed(error)
    try:
        _wrap_save_model(trainer.Trainer)
    except Exception as error:
        logger.warning(
            "hf_memopt could not wrap Trainer.save_model of transformers %s (%s: %s): do not resume from a checkpoint "
            "that a killed process was writing over.",
            _transformers_version(),
            type(error).__name__,
            error,
        )
    callbacks = getattr(trainer, "DEFAULT_CALLBACKS", None)
    if not isinstance(callbacks, list):
        logger.warning(
            "hf_memopt: transformers %s has no list of default callbacks, so there is no start table and checkpoints "
            "are not marked; pass callbacks=[hf_memopt.MemoptCallback()] to the Trainer.",
            _transformers_version(),
        )
    elif MemoptCallback not in callbacks:
        callbacks.append(MemoptCallback)


def add_reporter(integration_utils: ModuleType) -> None:
    """Make ``report_to=["hf_memopt", ...]`` known."""
    from .callbacks import REPORTER_NAME, MemoryReportCallback

    integration_utils.INTEGRATION_TO_CALLBACK[REPORTER_NAME] = MemoryReportCallback


def _wrap_get_optimizer(trainer_cls: type) -> None:
    original = trainer_cls.get_optimizer_cls_and_kwargs
    if getattr(original, WRAPPED, False):
        return

    @functools.wraps(original)
    def get_optimizer_cls_and_kwargs(args, model=None):
        name = getattr(args.optim, "value", args.optim)
        if is_registered(name):
            return optimizer_cls_and_kwargs(name, args, model)
        return original(args, model)

    setattr(get_optimizer_cls_and_kwargs, WRAPPED, True)
    trainer_cls.get_optimizer_cls_and_kwargs = staticmethod(get_optimizer_cls_and_kwargs)


def _wrap_save_model(trainer_cls: type) -> None:
    original = trainer_cls.save_model
    if getattr(original, WRAPPED, False):
        return

    @functools.wraps(original)
    def save_model(self, output_dir=None, *args, **kwargs):
        if self.args.should_save:
            remove_marker(output_dir or self.args.output_dir)
        return original(self, output_dir, *args, **kwargs)

    setattr(save_model, WRAPPED, True)
    trainer_cls.save_model = save_model


def _extend_str_enum(cls: Any, name: str, value: str) -> None:
    """Add ``name = value`` to a ``(str, Enum)`` class, as if it had been written in its body. CPython 3.10 to 3.13."""
    if value in cls._value2member_map_:
        return
    if name in cls._member_map_:
        raise ValueError(f"{cls.__name__}.{name} already means {cls._member_map_[name].value!r}")
    member = str.__new__(cls, value)
    member._name_, member._value_, member.__objclass__ = name, value, cls
    member._sort_order_ = len(cls._member_names_)
    if not hasattr(cls, name):
        setattr(cls, name, member)  # before the map knows the name: afterwards the enum refuses to be assigned to
    cls._member_map_[name] = member
    cls._member_names_.append(name)
    cls._value2member_map_[value] = member
    hashable = getattr(cls, "_hashable_values_", None)  # 3.12 and later
    if isinstance(hashable, list):
        hashable.append(value)


def _check_names(names: Any) -> None:
    """Use each name the way transformers, argparse and checkpoints do."""
    for spec in list_optimizers():
        member = names(spec.name)
        works = (
            member is names[spec.name.upper()]
            and member is getattr(names, spec.name.upper())
            and member == spec.name
            and member.value == spec.name
            and list(names).count(member) == 1
            and pickle.loads(pickle.dumps(member)) is member
        )
        if not works:
            raise RuntimeError(f"OptimizerNames({spec.name!r}) does not behave like the other members")


def _warn_registration_failed(error: Exception) -> None:
    logger.warning(
        "hf_memopt could not register its optimizer names with transformers %s (%s: %s): optim= will not know them; "
        'pass Trainer(optimizer_cls_and_kwargs=hf_memopt.optimizer_cls_and_kwargs("taco_adamw", args, model)) instead.',
        _transformers_version(),
        type(error).__name__,
        error,
    )


def _transformers_version() -> str:
    import transformers

    return transformers.__version__
