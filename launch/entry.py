"""The console script `tftpu`, which handles Ctrl-C even while the command line is imported."""

import sys

from tftpu.errors import ExitCode


def run() -> None:
    """Runs the command line of this process, and exits."""
    try:
        from tftpu.launch import main  # takes 0.3 s, during which Ctrl-C may be pressed

        main.run()
    except KeyboardInterrupt:
        print("tftpu: interrupted", file=sys.stderr)
        sys.exit(int(ExitCode.INTERRUPTED))
