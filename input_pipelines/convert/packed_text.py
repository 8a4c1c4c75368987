"""Text files as packed shards in the cache folder, converted on first use."""

import dataclasses
import hashlib

from tftpu.input_pipelines.convert import converter, publishing
from tftpu.input_pipelines.convert.conversion import Conversion
from tftpu.input_pipelines.convert.readers.reader import ReadOptions
from tftpu.input_pipelines.convert.readers.text import TextReader
from tftpu.installation import find_cache_folder
from tftpu.storage import files


def prepare_folder(patterns: str, options: ReadOptions, prefix: str = "text:") -> str:
    """Returns the folder with the packed text of a split; packs the text if it is new.

    Args:
        patterns, options, prefix: as for `TextReader`.
    """
    conversion = Conversion(f"text:{patterns}", "", options)
    reader = TextReader(patterns, options, prefix)
    # The hash changes with the text, so changed text is packed again under another name.
    name = hashlib.sha256(conversion.compute_fingerprint(reader).encode()).hexdigest()[:16]
    output = files.join(find_cache_folder("data"), "packed", name)
    conversion = dataclasses.replace(conversion, output=output)
    new = publishing.find_unfinished(conversion, reader) is not None
    # Prints only when text is packed: every command that opens the data calls this function.
    converter.run(conversion, reader=reader, say=print if new else lambda line: None)
    return output
