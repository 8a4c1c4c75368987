"""Before a run: commands that check a config or a machine."""
