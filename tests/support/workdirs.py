"""Workdirs as other processes leave or hold them."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import warm

_HOLD = (
    "import sys, time\nfrom tftpu.storage import locks\n"
    "with locks.locked(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)\n"
)


@contextlib.contextmanager
def held_by_another(workdir: Path) -> Iterator[int]:
    """Lets another process hold a workdir within the block, and kills it; yields its id."""
    command = [sys.executable, "-c", _HOLD, str(workdir)]
    holder = warm.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
