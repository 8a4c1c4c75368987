"""Records what runs while a file is read, by Python's audit events.

Run as a program, it gives commands many versions of a file, each in a fresh process:
`python -m tests.support.hostile.audit JOB.json`.
"""

import contextlib
import io
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of https://docs.python.org/3/library/audit_events.html. A module that is imported is executed.
RUN = {
    *("import", "exec", "compile", "marshal.loads", "pickle.find_class", "ctypes.dlopen"),
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen"),
    *("pty.spawn", "code.__new__", "function.__new__", "socket.connect", "urllib.Request"),
}
_seen: list[tuple[str, tuple]] | None = None
_installed = False


def _hook(event: str, arguments: tuple) -> None:
    if _seen is not None and event in RUN:
        _seen.append((event, arguments))


@contextlib.contextmanager
def audited() -> Iterator[list[str]]:
    """Yields a list that holds what ran within, once the block is left."""
    global _seen, _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    found: list[str] = []
    _seen = events = []
    try:
        yield found
    finally:
        _seen = None
        found += [f"{event} {_shown(arguments)}" for event, arguments in events]


def _shown(arguments: tuple) -> str:
    first = arguments[0] if arguments else ""
    return first.co_filename if isinstance(first, types.CodeType) else repr(first)[:100]


def _run(job: dict[str, Any]) -> None:
    """Gives each command each text in its file; prints what ran of others."""
    sys.path.insert(0, job["folder"])
    import tftpu.launch.main  # noqa: F401 (for all of the processes)

    found: list[str] = []
    for words in job["commands"]:
        read, write = os.pipe()
        if not os.fork():
            with open(write, "w") as output:
                json.dump(_ran(words, **job), output)
            os._exit(0)
        os.close(write)
        with open(read) as answer:
            found += json.load(answer)
    print(json.dumps(found))


def _ran(
    words: list[str], texts: list[str], file: str, folder: str, strict: bool, **_: Any
) -> list[str]:
    from tftpu.launch.main import main

    found: list[str] = []
    for number, text in enumerate(texts):
        Path(file).write_text(text)
        output = io.StringIO()
        with (
            audited() as ran,
            contextlib.redirect_stderr(output),
            contextlib.redirect_stdout(output),
        ):
            try:
                code = main(words)
            except Exception:  # Keras's, of settings that it accepts when an object is made
                assert not strict, (words, text)
                code = 0
        assert code in (0, 2), (words, code, text)
        found += [
            f"{' '.join(words)} on {text}: {line}"
            for line in (ran if strict or number else ())  # TensorFlow is loaded by the first
            if line.startswith(("os.", "subprocess", "pty", "pickle", "socket", "urllib"))
            or any(name in line for name in (folder, "canary", "'this'", "'lib2to3"))
        ]
    return found


if __name__ == "__main__":
    _run(json.loads(Path(sys.argv[1]).read_text()))
