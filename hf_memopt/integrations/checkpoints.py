"""Which checkpoint of a training is whole.

The Trainer writes ``checkpoint-N`` in place, file after file. A process killed meanwhile leaves a folder that looks
like a checkpoint, that ``resume_from_checkpoint=True`` picks because it is the newest, and that fails to load or,
worse, loads a mixture. So a finished save is *marked*:

1. the Trainer has written everything but ``trainer_state.json``, which comes last;
2. ``write_marker`` flushes those files to the disk and lists them, with size and fingerprint, in
   ``hf_memopt_checkpoint.json`` (written beside, flushed, renamed), under a save id;
3. the Trainer writes ``trainer_state.json``, and in it that save id;
4. only then may ``save_total_limit`` delete older checkpoints.

A checkpoint is whole if the listed files are as listed and ``trainer_state.json`` parses and carries the marker's id.
So there is no moment at which the last good checkpoint is gone and the next one not yet valid: killed before the end
of 3, the new folder does not count and the old ones are still there. A folder that is written over never passes for
whole by its old marker: that is removed before the first file is written (``remove_marker``, called from
``Trainer.save_model``). In a distributed run the other ranks write their random state while rank 0 marks; those files
must be there and be finished.

The fingerprint hashes 16 pieces of 64 KiB spread over a file, all of it below 1 MiB: enough to see damage, without
reading a checkpoint of many gigabytes twice. It is not relied on to tell two saves apart: of a large model that is
trained in a few layers only, two files of weights may differ between the pieces.

Nothing here imports torch or transformers. ``callbacks.py`` calls it from the Trainer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import uuid
import zipfile
from collections.abc import Iterator

logger = logging.getLogger("hf_memopt")

MARKER = "hf_memopt_checkpoint.json"
TRAINER_STATE = "trainer_state.json"
CALLBACK_KEY = "MemoptCallback"
FORMAT = 1

# the marker's own files, what is still to come, and what the Trainer puts there while it saves on SIGTERM
_NOT_PART = (MARKER, MARKER + ".tmp", TRAINER_STATE, "checkpoint-is-incomplete.txt")
_PIECES, _PIECE_BYTES = 16, 1 << 16
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_OPTIMIZER = re.compile(r"optimizer(\.pt$|\.bin$|_\d+/)")  # the last two: as accelerate names them


def last_complete_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The checkpoint that was saved last and is whole, or None: pass it on as
    ``trainer.train(resume_from_checkpoint=...)``.

    ``resume_from_checkpoint=True`` takes the highest number instead, also when the process died while it was being
    written::

        trainer.train(resume_from_checkpoint=hf_memopt.last_complete_checkpoint(args.output_dir))

    Saved last, not highest number: after going back to an earlier checkpoint the newer line of training counts. Only
    checkpoints written while ``hf_memopt`` was imported and one of its optimizers was training, or a model whose
    activations it keeps small, carry a marker; those of other runs are not considered, nor are those of
    ``save_only_model``, which hold no optimizer state; a warning says so if there is nothing else. Checkpoints
    may be copied or moved.

    With ``save_total_limit=1`` and a machine that loses power, rather than a process that is killed, the last
    checkpoint may not have reached the disk: keep two.

    Args:
        output_dir: Folder with ``checkpoint-N`` folders. It need not exist.
    """
    output_dir = os.fspath(output_dir)
    candidates = []
    for step, path in _checkpoints(output_dir):
        marker = read_marker(path)
        candidates.append((marker["sequence"] if marker else -1, step, path))
    reasons = []
    for _, _, path in sorted(candidates, reverse=True):
        reason = why_not_whole(path)
        if reason is None:
            return path
        reasons.append(f"{os.path.basename(path)}: {reason}")
    if reasons:
        logger.warning("No whole checkpoint in %s (%s).", output_dir, "; ".join(reasons))
    return None


def why_not_whole(path: str | os.PathLike[str]) -> str | None:
    """Why the checkpoint folder ``path`` must not be resumed from; None if it is whole."""
    path = os.fspath(path)
    marker = read_marker(path)
    if marker is None:
        if os.path.lexists(os.path.join(path, MARKER)):
            return f"its marker {MARKER} is damaged or of another version"
        return "it has no marker of a finished save"
    if not any(_OPTIMIZER.match(name) for name in marker["files"]):
        return "it was saved with save_only_model and holds no optimizer state"
    if _saved_id(path) != marker["save_id"]:
        return f"its {TRAINER_STATE} is missing, unfinished or of another save"
    for name, (size, digest) in marker["files"].items():
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            return f"{name} is missing"
        if os.path.getsize(file) != size:
            return f"{name} has {os.path.getsize(file)} bytes where {size} were saved"
        if fingerprint(file) != digest:
            return f"{name} is not the file that was saved"
    for name in marker["other_ranks"]:
        if not zipfile.is_zipfile(os.path.join(path, name)):
            return f"{name}, written by another process, is missing or unfinished"
    return None


def write_marker(path: str | os.PathLike[str], world_size: int = 1) -> str:
    """Mark the checkpoint folder ``path``, all of whose files but ``trainer_state.json`` are written; returns the id
    which that file must carry.

    Args:
        world_size: Number of training processes. Each writes its own ``rng_state_<rank>.pth``, all but rank 0's
            perhaps later than this.
    """
    path = os.fspath(path)
    if why_not_whole(path) is None:
        return read_marker(path)["save_id"]
    has_random_state = any(re.fullmatch(r"rng_state(_\d+)?\.pth", name) for name in os.listdir(path))
    others = [f"rng_state_{rank}.pth" for rank in range(1, world_size)] if has_random_state else []
    files = {}
    for name in _files(path):
        if name not in others:
            file = os.path.join(path, name)
            _flush(file)
            files[name] = (os.path.getsize(file), fingerprint(file))
    marker = {
        "format": FORMAT,
        "save_id": uuid.uuid4().hex,
        "sequence": 1 + max((m["sequence"] for m in map(read_marker, _siblings(path)) if m), default=0),
        "files": files,
        "other_ranks": others,
    }
    temporary = os.path.join(path, MARKER + ".tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(marker, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, os.path.join(path, MARKER))
    _flush_directory(path)
    _flush_directory(os.path.dirname(os.path.abspath(path)))
    return marker["save_id"]


def remove_marker(path: str | os.PathLike[str]) -> None:
    """Take back the word that ``path`` is whole, if it was given: the folder is about to be written over."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(path, MARKER))
        _flush_directory(path)


def read_marker(path: str | os.PathLike[str]) -> dict | None:
    """The marker of the checkpoint folder ``path``; None if there is none that this version can read."""
    marker = _read_json(os.path.join(path, MARKER))
    return marker if _well_formed(marker) else None


def set_aside_torn(output_dir: str | os.PathLike[str], beyond: int) -> list[str]:
    """Rename checkpoint folders above step ``beyond`` that a killed save left behind to ``torn-checkpoint-N``; returns
    their new paths.

    Otherwise they would count for ``save_total_limit``, which on some versions of transformers sorts by number and
    would then delete the checkpoints that training goes on to save. Torn are folders that hold no readable
    ``trainer_state.json``, which the Trainer writes last: nothing could resume from them. Their content is kept.
    """
    moved = []
    for step, path in _checkpoints(os.fspath(output_dir)):
        if step <= beyond or isinstance(_read_json(os.path.join(path, TRAINER_STATE)), dict):
            continue
        folder, name = os.path.split(path)
        aside = next(p for p in _numbered(os.path.join(folder, f"torn-{name}")) if not os.path.exists(p))
        os.rename(path, aside)
        logger.warning(
            "%s was left unfinished by an interrupted save and is set aside as %s.", path, os.path.basename(aside)
        )
        moved.append(aside)
    return moved


def fingerprint(file: str | os.PathLike[str]) -> str:
    """Hash of up to 16 pieces of 64 KiB, evenly spread, first and last included."""
    size = os.path.getsize(file)
    digest = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as f:
        if size <= _PIECES * _PIECE_BYTES:
            digest.update(f.read())
        else:
            for i in range(_PIECES):
                f.seek(i * (size - _PIECE_BYTES) // (_PIECES - 1))
                digest.update(f.read(_PIECE_BYTES))
    return digest.hexdigest()


def _well_formed(marker: object) -> bool:
    def is_entry(entry: object) -> bool:
        return isinstance(entry, list) and [type(part) for part in entry] == [int, str]

    return (
        isinstance(marker, dict)
        and type(marker.get("format")) is int
        and marker["format"] == FORMAT
        and isinstance(marker.get("save_id"), str)
        and type(marker.get("sequence")) is int
        and marker["sequence"] > 0
        and isinstance(marker.get("files"), dict)
        and all(map(is_entry, marker["files"].values()))
        and isinstance(marker.get("other_ranks"), list)
        and all(isinstance(name, str) for name in marker["other_ranks"])
    )


def _saved_id(path: str) -> str | None:
    state = _read_json(os.path.join(path, TRAINER_STATE))
    try:
        entry = state["stateful_callbacks"][CALLBACK_KEY]
        if isinstance(entry, list):  # the callback was added by hand as well, and the last one marked last
            entry = entry[-1]
        return entry["attributes"]["save_id"]
    except (KeyError, IndexError, TypeError):
        return None


def _read_json(file: str) -> object:
    try:
        with open(file, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def _checkpoints(output_dir: str) -> Iterator[tuple[int, str]]:
    if os.path.isdir(output_dir):
        for name in os.listdir(output_dir):
            match = _CHECKPOINT.fullmatch(name)
            path = os.path.join(output_dir, name)
            if match and os.path.isdir(path):
                yield int(match[1]), path


def _siblings(path: str) -> list[str]:
    return [sibling for _, sibling in _checkpoints(os.path.dirname(os.path.abspath(path)))]


def _files(path: str) -> Iterator[str]:
    """Relative names of the files that a save has written when it is marked."""
    for folder, _, names in os.walk(path):
        for name in names:
            relative = os.path.relpath(os.path.join(folder, name), path)
            if relative not in _NOT_PART:
                yield relative.replace(os.sep, "/")


def _numbered(path: str) -> Iterator[str]:
    yield path
    number = 2
    while True:
        yield f"{path}-{number}"
        number += 1


def _flush(file: str) -> None:
    with open(file, "rb+") as f:
        os.fsync(f.fileno())


def _flush_directory(path: str | os.PathLike[str]) -> None:
    if os.name == "nt":  # directories cannot be opened there; renames are journalled
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
