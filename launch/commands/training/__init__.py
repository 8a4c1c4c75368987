"""Train: commands for projects, models and configs, and for training and searches."""
