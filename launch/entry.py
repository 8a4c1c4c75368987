"""The console script `tftpu`, which handles Ctrl-C even while the command line is imported."""

import sys

from tftpu.errors import ExitCode


def run() -> None:
    """Runs the command line of this process, and exits."""
    try:
        from tftpu.launch import main  # takes a third of a second

        main.run()
    except KeyboardInterrupt:
        print("tftpu: interrupted", file=sys.stderr)
        sys.exit(int(ExitCode.INTERRUPTED))
