"""Hides log lines of TensorFlow's C++ code that ignore the log level."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

# meta_optimizer.cc reports an error if it leaves a graph unchanged, which is not a failure.
_NOTES = (b"I0000 ", b"before absl::InitializeLog", b" meta_optimizer.cc:")


@contextlib.contextmanager
def without_notes(hidden: tuple[bytes, ...] = _NOTES) -> Iterator[None]:
    """Hides some lines written to stderr in a `with` block; prints the others at its end.

    Args:
        hidden: texts; each line that contains one of them is hidden.
    """
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            written.seek(0)
            lines = [line for line in written if not any(part in line for part in hidden)]
            os.write(2, b"".join(lines))
