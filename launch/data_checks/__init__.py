"""The checks of data before a run, for `tftpu data check`."""
