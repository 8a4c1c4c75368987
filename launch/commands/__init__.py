"""The commands of `tftpu`, one file each; CONTRIBUTING.md describes how to add one.

A dash in the name of a command is an underscore in its file's name. The docstring of the file is
the help of the command, read verbatim, without escapes. `run` raises `UserError` for a mistake of
the user's, before TensorFlow is imported wherever possible.
"""

WORDLESS = ("finished",)  # folders that only group files, and are not words of a command
