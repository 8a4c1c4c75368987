"""The published runs that `python -m tftpu.launch.calibrate` compares with, and the fit to them."""
