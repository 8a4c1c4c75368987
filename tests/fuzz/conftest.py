"""Prints how many inputs each test of this folder tried: `FUZZ_SECONDS=60 pytest tests/fuzz`."""

from tests.support.hostile import fuzzing


def pytest_terminal_summary(terminalreporter) -> None:
    if fuzzing.SECONDS:
        for name, tried in fuzzing.TRIED.items():
            terminalreporter.write_line(f"{tried:10,} inputs: {name}")
