'''The commands of `tftpu`, one file each.

To add a command, add a file; nothing else is needed: `launch/commands/greet.py` is `tftpu greet`
(a dash in a command is an underscore in the file's name), `launch/commands/data/greet.py` is
`tftpu data greet`. Only a folder in `WORDLESS` is not a word of its commands. The file holds all of
the command:

    """Greets somebody.

    Further paragraphs of the help, if it needs any.

        tftpu greet --name=Ada
    """

    import dataclasses

    from tftpu.launch.settings.options import flag, required


    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        name: str = required("NAME", "whom to greet")
        times: int = flag(1, "number of greetings", minimum=1)


    def run(options: Options) -> None:
        print("\\n".join([f"Hello, {options.name}."] * options.times))

- The first paragraph of the docstring is the command's line in `tftpu help`; an indented paragraph
  is the example in its own help. It is read from the file verbatim, without escapes.
- `Options` is a frozen dataclass whose fields are the flags, with their types, defaults and help.
  It may inherit `ConfigOptions`, `DeviceOptions` or `RunOptions` of
  `tftpu.launch.settings.options`.
- `run` does the work. It raises `UserError` for a mistake of the user's, before TensorFlow is
  imported wherever possible. `tftpu help` and the other commands load this file, so that it
  imports nothing heavy (TensorFlow, Keras, clients of Google Cloud) outside functions.
'''

WORDLESS = ("finished",)  # folders that only sort files
