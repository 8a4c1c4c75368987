"""The processes of the JAX engine."""


class OneHost:
    """The only process of a run; see `tftpu.engines.engine.Hosts`."""

    index = 0
    count = 1
    chief = True

    def any(self, *flags: bool) -> list[bool]:
        """Returns the flags."""
        return list(flags)

    def from_chief(self, step: int | None) -> int | None:
        """Returns the value."""
        return step
