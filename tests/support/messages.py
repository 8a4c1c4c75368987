"""Checks the answer to a mistaken command line: one message, and perhaps the line to type."""


def check_message(said: str, expected: str) -> None:
    """Asserts that a command said one message, and nothing else but a line to type."""
    first, *further = said.strip().splitlines()
    assert expected in first
    assert [text.split(": tftpu ")[0] for text in further] in ([], ["Type"], ["For example"])
