"""What `python -m tftpu.launch.calibrate` compares, and the fit of prices to it."""
