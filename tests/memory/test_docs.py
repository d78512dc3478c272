"""The program in docs/memory.md runs as it stands there."""

import re
import subprocess
import sys

from benchmarks.common import ROOT


def test_the_program_of_the_page():
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "memory.md").read_text(encoding="utf8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(re.search(rf"^{row} +\d", done.stdout, re.MULTILINE) for row in ("weights", "optimizer state", "peak"))
    assert "gradients" not in done.stdout, "updates in backward leave none at any peak"
