"""Output of a run: writers, console, telemetry and profiles."""
