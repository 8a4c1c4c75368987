"""Train: commands that write, list, show, train and search configs."""
