"""The commands of `tftpu`, one file each; CONTRIBUTING.md describes how to add one.

A folder is a group in the help of `tftpu`; its docstring begins with the group's title. A dash in
the name of a command is an underscore in its file's name. The docstring of the file is the help of
the command; it is read as source text, so it must not have escapes. `run` raises `UserError` for a
mistake of the user's, wherever possible before TensorFlow is imported.
"""

GROUPS = ("training", "checking", "data", "finished", "launch")  # in the order of the help
WORDLESS = ("training", "checking", "finished")  # folders whose names are not part of a command
