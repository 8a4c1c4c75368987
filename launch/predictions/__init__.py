"""Parts of `tftpu predict`: the outputs, the records, and what is printed."""
