"""The memory simulation: byte for byte what the same training holds on real tensors, and nothing is computed.

Real runs are counted in two ways: by the log of the simulation itself on real tensors, and by torch's profiler in the
allocator, which sees kernels' inner buffers too.
"""

import contextlib
import json
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt import kernels
from hf_memopt.kernels import triton
from hf_memopt.memory import simulate
from hf_memopt.memory.storages import COMPONENTS, StorageLog
from hf_memopt.optim import TacoAdamW
from hf_memopt.optim.taco import Taco

TOKENS = 48
SHAPE = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4}


def llama(dtype=torch.float32, tied=False, frozen=False, **shape):
    def build():
        config = LlamaConfig(vocab_size=256, tie_word_embeddings=tied, **(SHAPE | shape))
        model = LlamaForCausalLM(config).to(dtype)
        if frozen:
            model.model.embed_tokens.requires_grad_(False)
            model.model.layers[0].requires_grad_(False)
        return model

    return build


class InBackward(torch.optim.Optimizer):
    """SGD with momentum that steps in hooks and frees each gradient; its state and temporaries are its own."""

    def __init__(self, params):
        super().__init__([p for p in params if p.requires_grad], {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            p.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, p):
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
        state["momentum"].mul_(0.9).add_(p.grad)
        p.sub_(state["momentum"] * 0.1)
        p.grad = None

    def step(self):
        pass


OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), foreach=False),
    "AdamW foreach": lambda model: torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), foreach=True),
    "in backward": lambda model: InBackward(model.parameters()),
}


def taco(model, **options):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return TacoAdamW(named, kernel="reference", **options)


def both(build, optimizer, **options):
    options = {"tokens": TOKENS, "granularity": 1, **options}
    return simulate.simulate(build, optimizer, **options), simulate.measure(build, optimizer, **options)


def bytes_of(memory):
    moments = [*memory.phases.items(), *memory.after.items()]
    return [(phase, moment.nbytes, moment.components) for phase, moment in moments]


@pytest.mark.parametrize("checkpointing", [False, True, "reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_equals_the_real_run(optimizer, dtype, checkpointing):
    simulated, real = both(llama(dtype), optimizer, gradient_checkpointing=checkpointing)
    assert bytes_of(simulated) == bytes_of(real)
    assert simulated.largest == real.largest
    assert simulated.first_peak_bytes == real.first_peak_bytes


@pytest.mark.parametrize("checkpointing", [True, "reentrant"])
@pytest.mark.parametrize("variant", [{"tied": True}, {"frozen": True}], ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW", "in backward"])
def test_equals_the_real_run_of_tied_and_frozen_parameters(optimizer, variant, checkpointing):
    simulated, real = both(
        llama(torch.bfloat16, **variant), OPTIMIZERS[optimizer], gradient_checkpointing=checkpointing, batch=2
    )
    assert bytes_of(simulated) == bytes_of(real)
    model = llama(torch.bfloat16, **variant)()
    assert simulated.phases["step"].components["weights"] == sum(p.nbytes for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if optimizer == "AdamW":
        assert simulated.phases["step"].components["gradients"] == 2 * trained


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ternary_optimizer_equals_the_real_one_but_for_the_kernels_temporaries(dtype, in_backward):
    """The real run uses the reference kernel, whose temporaries are others; everything else must be equal."""
    simulated, real = both(llama(dtype), lambda model: taco(model, update_in_backward=in_backward))

    def rest(moment):
        return {c: n for c, n in moment.components.items() if c != "optimizer temporaries"}

    for phase in simulate.PHASES:
        assert rest(simulated.after[phase]) == rest(real.after[phase])
    for phase in ("forward", "step") if in_backward else simulate.PHASES:
        assert rest(simulated.phases[phase]) == rest(real.phases[phase])
    model = llama(dtype)()
    optimizer = taco(model)
    assert simulated.phases["step"].components["optimizer state"] == optimizer.memory_report().state_bytes
    # one bool a parameter until the next step, the workspace of the largest parameter while it is updated
    answers = len(list(model.parameters()))
    workspace = max(triton.Plan(*p.shape).workspace_bytes for p in model.parameters() if p.dim() == 2)
    temporaries = [moment.components["optimizer temporaries"] for moment in simulated.phases.values()]
    norms = 2 * 4 * answers if in_backward else 0  # of this step and of the last
    assert max(temporaries) <= workspace + 2 * answers + norms + 8 * answers


def one_sparse(model):
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return Taco([{"params": trained, "treatment": "one_sparse"}], kernel="reference", update_in_backward=True)


def test_updates_that_repeat_are_carried_out_once_and_count_as_often(monkeypatch):
    """One of each kind, all of them, and the real run, of a model in which only one-sparse parameters are trained."""

    def build():
        model = llama(torch.float32)()  # of a 16-bit gradient the CPU converts pieces for the norm, a GPU does not
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("proj.weight"))
        return model

    once = simulate.simulate(build, one_sparse, tokens=TOKENS, granularity=1)
    monkeypatch.setattr(simulate, "updates_once", lambda log: contextlib.nullcontext())
    in_full, real = both(build, one_sparse)
    assert bytes_of(once) == bytes_of(in_full)
    # a real run also keeps whether each update was applied: a byte a parameter, stacked, and on the host
    flags = 3 * sum(p.requires_grad for p in build().parameters())
    for (phase, simulated, parts), (_, counted, real_parts) in zip(bytes_of(in_full), bytes_of(real), strict=True):
        assert 0 <= counted - simulated <= flags, phase
        for component in set(COMPONENTS) - {"optimizer temporaries"}:
            assert parts[component] == real_parts[component], (phase, component)
    assert once.phases["backward"].components["optimizer temporaries"] > 100_000


def test_update_in_backward_holds_no_gradient_after_backward():
    without, within = (
        simulate.simulate(llama(), lambda m, on=on: taco(m, update_in_backward=on), tokens=TOKENS)
        for on in (False, True)
    )
    assert without.after["backward"].components["gradients"] == without.after["backward"].components["weights"]
    assert within.after["backward"].components["gradients"] == 0
    assert within.phases["step"].components["gradients"] == 0
    largest = max(p.nbytes for p in llama()().parameters())
    assert within.phases["backward"].components["gradients"] <= 2 * largest
    assert within.peak.nbytes < without.peak.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW", "in backward"])
def test_equals_what_the_allocator_gives_out(optimizer, dtype):
    build, tokens = llama(dtype), 256
    model = build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    stepper = OPTIMIZERS[optimizer](model)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def iteration():
        simulate.causal_lm_loss(model, batch).backward()
        stepper.step()
        stepper.zero_grad()

    iteration()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        iteration()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = rise = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        rise = max(rise, now)
    simulated = simulate.simulate(build, OPTIMIZERS[optimizer], tokens=tokens, granularity=1)
    expected = simulated.peak.nbytes - simulated.after["step"].nbytes
    # the CPU's attention kernel has fp32 buffers of its own: query, key and value blocks and their products
    inner = 4 * tokens * 4 * SHAPE["hidden_size"] if simulated.peak_phase == "backward" else 64
    assert expected <= rise <= expected + inner


NOTHING_COMPUTED = """
import json, torch
from torch._subclasses.fake_tensor import FakeTensor
from hf_memopt.memory import peak, simulate
from tests.memory.test_simulate import llama, taco

fake = []

def loss(model, batch):
    value = simulate.causal_lm_loss(model, batch)
    fake.extend(isinstance(t, FakeTensor) for t in [*model.parameters(), value])
    return value

simulate.simulate(llama(), taco, tokens=16)  # what is imported at the first call is not the point
before = peak.peak_resident_bytes()
build = llama(torch.bfloat16, hidden_size=4096, intermediate_size=11008, num_hidden_layers=4)
memory = simulate.simulate(build, taco, tokens=2048, batch=4, loss=loss)
print(json.dumps([memory.peak_bytes, peak.peak_resident_bytes() - before, len(fake), all(fake)]))
"""


def test_nothing_is_computed_and_the_host_stays_small():
    """In a process of its own, whose peak is its own."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", NOTHING_COMPUTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    simulated, grown, count, all_fake = json.loads(done.stdout.splitlines()[-1])
    assert simulated > 3 << 30 and grown < 1 << 26
    assert count > 0 and all_fake


def test_a_lora_model_counts_its_frozen_weights_once():
    peft = pytest.importorskip("peft")

    def build():
        return peft.get_peft_model(llama(torch.bfloat16)(), peft.LoraConfig(r=4, target_modules="all-linear"))

    simulated, real = both(build, OPTIMIZERS["AdamW"])
    assert bytes_of(simulated) == bytes_of(real)
    adapters = sum(p.numel() for p in build().parameters() if p.requires_grad)
    assert simulated.phases["step"].components["gradients"] == 4 * adapters


def test_a_peak_is_the_sum_of_its_components_and_of_its_storages():
    memory = simulate.simulate(llama(), taco, tokens=TOKENS, largest=10_000)
    for moment in memory.phases.values():
        assert tuple(moment.components) == COMPONENTS
        assert sum(moment.components.values()) == moment.nbytes
    assert sum(kind.nbytes for kind in memory.largest) == memory.peak.nbytes == memory.as_dict()["peak_bytes"]
    assert memory.table().splitlines()[-1].startswith("peak")


def test_the_log_counts_storages_not_tensors():
    with StorageLog() as log:
        x = torch.zeros(10)
        view = x[2:].view(2, 4)
        assert log.at(log.position).nbytes == 40
        x.untyped_storage().resize_(80)
        x.add_(1)
        assert log.at(log.position).nbytes == 80
        del x
        assert log.at(log.position).nbytes == 80
        log.label([view], "gradients")
        del view
        assert log.at(log.position).nbytes == 0
        top = log.peak(0, log.position)
    assert top.nbytes == top.components["gradients"] == 80


def test_granularity_rounds_every_storage_up():
    with StorageLog(granularity=512) as log:
        _kept = torch.zeros(1), torch.zeros(129)
        assert log.at(log.position).nbytes == 512 + 1024


@pytest.mark.parametrize("shape", [(64, 320), (97, 163), (300, 1)])
def test_the_simulated_kernel_allocates_what_the_triton_kernels_do(shape, monkeypatch):
    """The launches are left out on the real side, nothing else."""
    pytest.importorskip("triton")
    from hf_memopt.kernels import simulated, triton_kernels

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    for name in ("squared_sums", "ternary_factors", "ternary_update", "gradient_check", "dense_update"):
        monkeypatch.setattr(triton_kernels, name, Launched())
    p = torch.nn.Parameter(torch.ones(shape))
    for treatment in ("ternary", "dense"):
        optimizer = TacoAdamW([{"params": [p], "treatment": treatment}])
        state = optimizer.state_of(optimizer.param_groups[0], p)
        peaks = []
        for backend, tensors in ((triton, _same), (simulated, _faked)):
            arguments = tensors([p.detach(), torch.ones(shape)]), tensors(state)
            with StorageLog(fake=tensors is _faked) as log, _mode(tensors):
                step = getattr(backend, f"{treatment}_adamw_")
                kept = step(*arguments[0], arguments[1], _scalars())
                peaks.append((log.peak(0, log.position).nbytes, log.at(log.position).nbytes))
            del kept
        assert peaks[0] == peaks[1]
        if treatment == "ternary":
            assert peaks[0] == (triton.Plan(*shape).workspace_bytes + 1, 1)


def test_only_a_simulation_gets_the_simulated_kernel_and_only_fake_tensors_are_taken():
    p = torch.nn.Parameter(torch.ones(64, 64))
    p.grad = torch.ones(64, 64)
    assert kernels.select("reference", "cpu")[0] == "reference"
    with kernels.simulating():
        assert kernels.select("auto", "cpu")[0] == "simulated"
        with pytest.raises(ValueError, match="takes fake tensors only"):
            TacoAdamW([p]).step()
    assert kernels.select("reference", "cpu")[0] == "reference"
    assert "simulated" not in kernels.KERNELS


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0."),
        ({"tokens": 8, "steps": 1}, "steps must be a whole number of at least 2, got 1."),
        ({"tokens": 8, "batch": 1.5}, "batch must be a whole number of at least 1, got 1.5."),
        ({"tokens": 8, "gradient_checkpointing": "yes"}, "gradient_checkpointing must be True, False or 'reentrant'"),
    ],
)
def test_wrong_arguments_are_named(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        simulate.simulate(llama(), taco, **options)


def test_a_model_without_gradient_checkpointing_is_named():
    with pytest.raises(ValueError, match="Linear has no gradient checkpointing: set gradient_checkpointing=False."):
        simulate.simulate(lambda: torch.nn.Linear(4, 4), taco, tokens=8)


def _scalars():
    from hf_memopt.kernels.scalars import StepScalars

    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    return StepScalars.at_step(1, parameter_key=0, stochastic=True, maximize=False, **options)


def _same(tensors):
    return tensors


def _faked(tensors):
    values = tensors.values() if isinstance(tensors, dict) else tensors
    faked = [_MODE.from_tensor(t) if torch.is_tensor(t) else t for t in values]
    return dict(zip(tensors, faked, strict=True)) if isinstance(tensors, dict) else faked


def _mode(tensors):
    return _MODE if tensors is _faked else contextlib.nullcontext()


_MODE = FakeTensorMode()
