"""Texts that hosts share, in memory: threads in place of the hosts."""

import threading


class Texts:
    """A store in memory, with the methods of `tftpu.engines.jax.processes.watch.Store`."""

    def __init__(self):
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()

    def put(self, name, text):
        """Sets a text."""
        with self.changed:
            self.texts[name] = text
            self.changed.notify_all()

    def read_texts(self, name):
        """Returns the texts below a name."""
        found = {k: v for k, v in self.texts.items() if k.startswith(f"{name}/")}
        return {key.rpartition("/")[2]: text for key, text in found.items()}

    def wait_for(self, name):
        """Returns a text as soon as it is set."""
        with self.changed:
            assert self.changed.wait_for(lambda: name in self.texts, 10)
            return self.texts[name]

    def remove(self, name):
        """Removes the texts whose names begin so."""
        for key in [key for key in self.texts if key.startswith(name)]:
            del self.texts[key]
