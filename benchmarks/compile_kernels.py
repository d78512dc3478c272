"""Compile the Triton kernels for GPUs that are not here, and look at what comes out. Needs triton, no GPU.

    python -m benchmarks.compile_kernels            # every variant: benchmarks/results/kernels/compiled.json, minutes
    python -m benchmarks.compile_kernels --few      # one variant of each kernel, printed, nothing written
    python -m benchmarks.compile_kernels --docs     # the tables of docs/kernels.md, from the JSON file

The launch code of the package itself runs on tensors without storage, and what it would launch is compiled instead:
types, strides and alignments are the ones that a training run has. Recorded for each kernel and architecture:

    registers, spills (loads and stores of local memory), stack and shared memory, instructions, warps that fit a
    multiprocessor, width of the accesses to global memory, and instructions that must not be there: contracted products
    (`fma.rn.f32`), approximate or flushing arithmetic, contractions in the machine code of kernels that do not divide
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common import RESULTS, ROOT, write_json
from benchmarks.demo import table
from benchmarks.tables import replace_block
from hf_memopt.codecs import base
from hf_memopt.codecs.dense import Dense
from hf_memopt.codecs.ternary import TernaryFirstMoment, TernarySecondMoment
from hf_memopt.kernels import triton as backend
from hf_memopt.kernels import trits
from hf_memopt.kernels.scalars import StepScalars

ARCHITECTURES = (80, 90, 100)
RECORD = RESULTS / "kernels" / "compiled.json"
DOCS = ROOT / "docs" / "kernels.md"
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
POINTERS = SHORT | {torch.uint8: "u8", torch.bool: "i1", torch.float64: "fp64"}
REGISTERS_OF_A_MULTIPROCESSOR = 65536
MATRICES = {
    "SmolLM2-135M attention": (576, 576),
    "SmolLM2-135M MLP": (1536, 576),
    "SmolLM2-135M embedding": (49152, 576),
    "Llama-7B attention": (4096, 4096),
    "Llama-7B MLP": (11008, 4096),
    "Llama-7B MLP, down": (4096, 11008),
    "Llama-7B embedding": (32000, 4096),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One call of the step: what decides which machine code it runs."""

    kind: str
    shape: tuple[int, int]
    weight: torch.dtype
    gradient: torch.dtype
    stochastic: bool = True
    maximize: bool = False
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel as the package would launch it, ready to compile; equal launches are equal machine code."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def label(self) -> str:
        """The kernel's name and what sets this variant apart, e.g. `ternary_update[full] bf16/fp32 stochastic`."""
        types, constants = dict(self.signature), dict(self.constants)
        words = [self.kernel]
        if "TAIL" in constants:
            words[0] += "[tail]" if constants["TAIL"] else "[full]"
        if dtypes := [types[name].removeprefix("*") for name in ("param", "grad") if name in types]:
            words.append("/".join(dtypes))
        words += [name.lower() for name in ("STOCHASTIC", "MAXIMIZE") if constants.get(name)]
        if "grad" in types:
            if "grad_col" not in constants:
                words.append("strided")
            elif "grad_row" not in self.aligned and "grad_row" not in constants:
                words.append("unaligned")
        if "code_row" in self.aligned:
            words.append("aligned codes")
        if constants.get("COLS") == 1:
            words.append("vector")
        return " ".join(words)


def variants(few: bool) -> Iterator[Variant]:
    """Calls that together reach every variant of the kernels: dtypes, write-backs, alignments, strides."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    if few:
        yield Variant("ternary", (4096, 4096), bf16, bf16)
        yield Variant("dense", (4096, 4096), f32, f32)
        return
    for kind in ("ternary", "dense"):
        for weight, gradient in ((f32, f32), (bf16, bf16), (f16, f16)):
            odd = (333, 1001)
            yield Variant(kind, (4096, 4096), weight, gradient)
            yield Variant(kind, (4096, 4096), weight, gradient, maximize=True)
            yield Variant(kind, odd, weight, gradient)
            yield Variant(kind, odd, weight, gradient, transposed=True)
            if kind == "dense":
                yield Variant(kind, (4096, 1), weight, gradient)
            else:
                yield Variant(kind, (4096, 2560), weight, gradient)  # 512 bytes of codes a row
            if weight != f32:
                yield Variant(kind, (4096, 4096), weight, gradient, stochastic=False)
        for weight, gradient in ((bf16, f32), (f16, f32), (f32, bf16), (f32, f16)):
            yield Variant(kind, (4096, 4096), weight, gradient)


def launches(variant: Variant) -> list[Launch]:
    """What the package launches for one step of this variant."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def record(fn, *args, grid, warmup, **kwargs):
        found.append(as_launch(fn, args, kwargs))

    shape = variant.shape
    codecs = (
        {"exp_avg": TernaryFirstMoment(), "exp_avg_sq": TernarySecondMoment()}
        if variant.kind == "ternary"
        else {"exp_avg": Dense(), "exp_avg_sq": Dense()}
    )
    layout = shape[::-1] if variant.transposed else shape
    weight, gradient = (torch.empty(layout, dtype=t, device="meta") for t in (variant.weight, variant.gradient))
    if variant.transposed:
        weight, gradient = weight.t(), gradient.t()
    scalars = StepScalars.at_step(
        2, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, parameter_key=1,
        stochastic=variant.stochastic, maximize=variant.maximize,
    )  # fmt: skip
    state = base.zeros(codecs, torch.Size(shape), torch.device("meta"))
    step = backend.ternary_adamw_ if variant.kind == "ternary" else backend.dense_adamw_
    with replaced(JITFunction, "run", record):
        step(weight, gradient, state, scalars)
    return found


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def as_launch(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Launch:
    """Types and specialisations of the arguments, by Triton's rules: an integer 1 is a constant, multiples of 16 and
    pointers to multiples of 16 are marked."""
    names = [p.name for p in fn.params]
    given = dict(zip(names, args, strict=False)) | kwargs
    options = {key: given.pop(key) for key in list(given) if key not in names}
    signature, constants, aligned = {}, {}, []
    for p in fn.params:
        value = given[p.name]
        special = not p.do_not_specialize
        if p.is_constexpr or (special and type(value) is int and value == 1):
            signature[p.name], constants[p.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[p.name] = "*" + POINTERS[value.dtype]
            if special and value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(p.name)
        elif isinstance(value, int):
            signature[p.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if special and value % 16 == 0:
                aligned.append(p.name)
        else:
            signature[p.name] = "fp32"
    return Launch(
        fn.__name__, tuple(signature.items()), tuple(constants.items()), tuple(aligned), tuple(sorted(options.items()))
    )


def compile_launch(launch: Launch, architecture: int) -> dict[str, Any]:
    """Compile for sm_`architecture`; what the machine code is like."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_memopt.kernels import triton_kernels

    fn = getattr(triton_kernels, launch.kernel)
    position = {p.name: i for i, p in enumerate(fn.params)}
    source = ASTSource(
        fn=fn,
        signature=dict(launch.signature),
        constexprs={(position[name],): value for name, value in launch.constants},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    options = dict(launch.options)
    kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = objdump("-res-usage", cubin)
        machine = objdump("-sass", cubin)
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    opcodes = collections.Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", machine, re.MULTILINE)
    )
    divides = ptx.count("div.rn.f32") + ptx.count("sqrt.rn.f32")
    contracted = sum(n for op, n in opcodes.items() if op.startswith("FFMA"))
    constants = dict(launch.constants)
    threads = 32 * options["num_warps"]
    per_warp = -(-registers // 8) * 8 * 32
    result = {
        "kernel": launch.label(),
        "architecture": f"sm_{architecture}",
        "registers": registers,
        "spills": sum(n for op, n in opcodes.items() if op.split(".")[0] in ("LDL", "STL")),
        "stack_bytes": stack,
        "shared_bytes": kernel.metadata.shared,
        "warps_by_registers": REGISTERS_OF_A_MULTIPROCESSOR // (per_warp * options["num_warps"]) * options["num_warps"],
        "instructions": sum(n for op, n in opcodes.items() if op != "NOP"),
        "barriers": sum(n for op, n in opcodes.items() if op.startswith("BAR.")),
        "global_accesses": accesses(opcodes),
        "forbidden": {
            "fma.rn.f32": len(re.findall(r"\bfma\.rn(\.ftz)?\.f32", ptx)),
            "flush to zero": len(re.findall(r"\b(?:add|sub|mul|div\.rn|sqrt\.rn)[\w.]*\.ftz", ptx)),
            "approximate": len(re.findall(r"\b(?:div\.(?:full|approx)|sqrt\.approx|rcp\.approx)", ptx)),
            "contracted in machine code": 0 if divides else contracted,
        },
        "rounded": {name: ptx.count(name) for name in ("div.rn.f32", "sqrt.rn.f32")},
    }
    if launch.kernel == "ternary_update":
        elements = constants["ROWS"] * trits.BLOCK // threads
        result["instructions_per_element"] = round(result["instructions"] / elements, 1)
    return result


def accesses(opcodes: collections.Counter) -> dict[str, int]:
    """Loads and stores of global memory by the bytes a thread moves, e.g. `load 16`."""
    width = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    found: dict[str, int] = collections.defaultdict(int)
    for op, n in opcodes.items():
        name, *marks = op.split(".")
        if name in ("LDG", "STG"):
            size = next((width[m] for m in marks if m in width), 4)
            found[f"{'load' if name == 'LDG' else 'store'} {size}"] += n
    return dict(sorted(found.items()))


def objdump(option: str, cubin: pathlib.Path) -> str:
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def kernel_digest() -> str:
    """A hash over the sources that decide the machine code."""
    digest = hashlib.sha256()
    for name in ("triton.py", "triton_kernels.py", "triton_numbers.py"):
        digest.update((ROOT / "hf_memopt" / "kernels" / name).read_bytes())
    return digest.hexdigest()[:16]


def compile_all(architectures: tuple[int, ...], few: bool, jobs: int) -> list[dict[str, Any]]:
    """Every distinct launch of every variant, for every architecture, sorted by label."""
    distinct = list(dict.fromkeys(launch for variant in variants(few) for launch in launches(variant)))
    work = [(launch, architecture) for launch in distinct for architecture in architectures]
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        done = [pool.submit(compile_launch, *item) for item in work]
        results = []
        for number, future in enumerate(done, 1):
            results.append(future.result())
            print(f"\r{number}/{len(work)}", end="", flush=True)
    print()
    return sorted(results, key=lambda r: (r["kernel"], r["architecture"]))


def traffic() -> list[dict[str, Any]]:
    """Bytes a parameter of the ternary step for the matrices of two models, and of a fused AdamW with state in the
    weights' dtype (weights, gradient and two moments read; weights and moments written)."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, (n, k) in MATRICES.items():
            moved = {key: round(value, 3) for key, value in backend.bytes_moved(n, k, dtype, dtype).items()}
            workspace = backend.Plan(n, k).workspace_bytes / (n * k * dtype.itemsize)
            row = {"matrix": name, "shape": [n, k], "dtype": SHORT[dtype], "bytes_a_parameter": moved}
            rows.append(row | {"fused_adamw": 7 * dtype.itemsize, "temporaries_of_the_weights": round(workspace, 4)})
    return rows


def documentation(record: dict[str, Any]) -> dict[str, str]:
    """The generated blocks of docs/kernels.md."""
    moved = [
        {
            "matrix": r["matrix"],
            "shape": " x ".join(map(str, r["shape"])),
            "dtype": r["dtype"],
            "moved": f"{r['bytes_a_parameter']['total']:.2f}",
            "floor": f"{r['bytes_a_parameter']['floor']:.2f}",
            "of which partial sums": f"{r['bytes_a_parameter']['partial sums']:.2f}",
            "fused AdamW": str(r["fused_adamw"]),
            "temporaries": f"{r['temporaries_of_the_weights']:.1%} of the weights",
        }
        for r in record["traffic"]
    ]
    shown = re.compile(
        r"ternary_update\[\w+\] (fp32/fp32|bf16/bf16 stochastic|fp16/fp16 stochastic)|squared_sums (bf16|fp32)|"
        r"ternary_factors|gradient_check bf16|dense_update (fp32/fp32|bf16/bf16 stochastic)"
    )
    by_kernel: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for r in sorted(record["kernels"], key=lambda r: int(r["architecture"].removeprefix("sm_"))):
        if shown.fullmatch(r["kernel"]):
            by_kernel[r["kernel"]].append(r)

    def each(rows: list[dict[str, Any]], key: str) -> str:
        return " / ".join(str(r.get(key, "")) for r in rows)

    compiled = [
        {
            "kernel": f"`{name}`",
            "registers": each(rows, "registers"),
            "warps": each(rows, "warps_by_registers"),
            "shared bytes": each(rows, "shared_bytes"),
            "instructions": each(rows, "instructions"),
            "an element": each(rows, "instructions_per_element") if name.startswith("ternary_update") else "",
        }
        for name, rows in sorted(by_kernel.items())
    ]
    architectures = sorted({r["architecture"] for r in record["kernels"]}, key=lambda a: int(a.removeprefix("sm_")))
    worst = max(r["registers"] for r in record["kernels"])
    count = len({r["kernel"] for r in record["kernels"]})
    summary = (
        f"{count} variants for {', '.join(architectures)}, compiled with triton {record['triton']}: "
        f"{sum(r['spills'] for r in record['kernels'])} spills, at most {worst} registers, "
        f"{sum(sum(r['forbidden'].values()) for r in record['kernels'])} forbidden instructions. "
        f"Three numbers in a cell are for {' / '.join(architectures)}; warps are those whose registers fit a "
        "multiprocessor; instructions are counted in the machine code, slow paths of divisions included."
    )
    return {"bytes": table(moved), "compiled": f"{summary}\n\n{table(compiled)}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="one variant of each kernel; prints JSON, writes nothing")
    parser.add_argument("--docs", action="store_true", help="only fill the tables of docs/kernels.md from the record")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=pathlib.Path, default=RECORD)
    given = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("error: TRITON_INTERPRET=1 makes Triton interpret, not compile: unset it")
    if not given.docs:
        import triton

        kernels = compile_all(tuple(given.architectures), given.few, given.jobs)
        record = {
            "triton": triton.__version__,
            "source": kernel_digest(),
            "options": backend.LAUNCH,
            "kernels": kernels,
            "traffic": traffic(),
        }
        if given.few:
            print(json.dumps(record))
            return
        write_json(given.output, record)
    if given.output == RECORD:
        text = DOCS.read_text(encoding="utf8")
        for name, content in documentation(json.loads(RECORD.read_text(encoding="utf8"))).items():
            text = replace_block(text, name, content)
        DOCS.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
