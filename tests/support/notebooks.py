"""Helpers of the tests of notebooks: parameters to set, and the printed text."""

import nbformat


def set_parameter(notebook: nbformat.NotebookNode, line: str, replacement: str) -> None:
    """Replaces a line of the cell with the parameters, the second one."""
    cell = notebook.cells[1]
    assert line in cell.source
    cell.source = cell.source.replace(line, replacement)


def read_text(notebook: nbformat.NotebookNode) -> str:
    """Returns what the cells of an executed notebook printed."""
    return "\n".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream"
    )
