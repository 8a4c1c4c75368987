"""Cloud: the commands `tftpu launch ...`."""
