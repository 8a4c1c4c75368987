"""The logs of a search, one file for each trial. On a disk, they are in `logs/` of the workdir.

A process cannot print into a bucket. If the workdir is in a bucket, each file is in a folder of
this machine until its trial ends, and is then uploaded to the trial's folder, such as
`trials/0007/log`.
"""

import os
import tempfile
from types import TracebackType

from tftpu.errors import UserError
from tftpu.storage import files


class Logs:
    """The logs of a search. A context manager that finally removes its temporary folder, if any.

    Args:
        workdir: the workdir of the search, local or `gs://`.
    """

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._temporary = tempfile.TemporaryDirectory() if files.is_remote(workdir) else None
        self._folder = self._temporary.name if self._temporary else os.path.join(workdir, "logs")
        os.makedirs(self._folder, exist_ok=True)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def begin(self, number: int) -> str:
        """Returns the local path of a trial's log, with the output of earlier workers if any."""
        path = self._resolve_path(number)
        if self._temporary is not None and files.exists(self.resolve_destination(number)):
            with open(path, "wb") as file:
                file.write(files.read(self.resolve_destination(number)))
        return path

    def keep(self, number: int) -> str:
        """Uploads the log of a trial if it belongs in a bucket; returns why that failed, or ""."""
        path = self._resolve_path(number)
        if self._temporary is None or not os.path.exists(path):
            return ""
        try:
            with open(path, "rb") as file:
                files.write_whole(self.resolve_destination(number), file.read())
        except (OSError, UserError) as error:
            return f"its log could not be uploaded: {error}"
        return ""

    def resolve_destination(self, number: int) -> str:
        """Returns the final path of a trial's log."""
        if self._temporary is None:
            return self._resolve_path(number)
        return files.join(self._workdir, "trials", f"{number:04d}", "log")

    def _resolve_path(self, number: int) -> str:
        return os.path.join(self._folder, f"{number:04d}.log")
