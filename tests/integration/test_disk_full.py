"""A save for which there is no room fails loudly, and the checkpoint before it is the one to resume from."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from tiny_llama import trainer

import hf_memopt

resource = pytest.importorskip("resource", reason="file size limits are a matter of Unix")


@contextlib.contextmanager
def files_of_at_most(nbytes: int):
    """Writing beyond ``nbytes`` fails in this process, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_save_without_room_leaves_the_last_checkpoint_whole(tmp_path):
    trainer(tmp_path, max_steps=2).train()
    whole = hf_memopt.last_complete_checkpoint(tmp_path)
    size = os.path.getsize(os.path.join(whole, "model.safetensors"))
    with files_of_at_most(size // 2), pytest.raises(Exception, match="File too large"):
        trainer(tmp_path, max_steps=6, save_total_limit=1).train(resume_from_checkpoint=whole)
    assert (tmp_path / "checkpoint-4").is_dir()
    assert hf_memopt.last_complete_checkpoint(tmp_path) == whole

    finished = trainer(tmp_path, max_steps=6, save_total_limit=1)
    finished.train(resume_from_checkpoint=whole)
    assert finished.state.global_step == 6
    assert hf_memopt.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    assert (tmp_path / "torn-checkpoint-4").is_dir()
