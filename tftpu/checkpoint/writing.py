"""Writes the files of a checkpoint, from one process or from several that each hold a shard.

With several, the chief clears the folder, all write their files, and the chief writes the manifest
once it knows the checksums of all files. If a process is lost before that, the folder has no
manifest, and so it is not a checkpoint.
"""

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from tftpu.checkpoint import manifest, matching
from tftpu.checkpoint.host_copy import Copied
from tftpu.checkpoint.manifest import Block, Blocks, Listing
from tftpu.engines.engine import Exchange
from tftpu.storage import files, safetensors
from tftpu.storage.own_files import OwnFile

STATE = "state.json"
_DRAWS = random.SystemRandom()
_FAILED = "failed"  # the key of a failure's reason in a report

Copies = Mapping[str, Sequence[Copied]]


class Writing:
    """The writing of one checkpoint.

    Args:
        folder: the checkpoint's folder.
        step: the step of the checkpoint.
        copies: the regions of leaves that this process writes, by group.
        state: the host's state, as JSON.
        marker: the manifest's file.

    Attributes:
        begun: whether this process has changed the folder.
    """

    def __init__(self, folder: str, step: int, copies: Copies, state: bytes, marker: OwnFile):
        self._folder = folder
        self._step = step
        self._copies = copies
        self._state = state
        self._marker = marker
        self.begun = False

    def write_alone(self) -> None:
        """Writes the checkpoint as the only process.

        Raises:
            ChangedError: another process wrote the manifest meanwhile; its checkpoint is valid.
            OSError: a file could not be written; the checkpoint is not valid.
        """
        self._remove_leftovers()
        listed = manifest.write_files(self._folder, self._collect_chief_contents())
        manifest.commit(self._step, listed, self._marker)

    def as_chief(self, exchange: Exchange, prepare: Callable[[], None]) -> None:
        """Writes the checkpoint together with other processes, and makes it valid.

        Args:
            exchange: passes texts to the other processes.
            prepare: function that is called before anything is written.

        Raises:
            ChangedError: another process wrote the manifest meanwhile; its checkpoint is valid.
            OSError: a process could not write its files; the checkpoint is not valid.
        """
        with self._announcing(exchange, "begun"):
            prepare()
            self._remove_leftovers()
        save = _DRAWS.randrange(10**9)
        exchange.announce(self._format_name("begun"), json.dumps({"save": save}))
        with self._announcing(exchange, "ended"):
            try:
                listed = manifest.write_files(self._folder, self._collect_chief_contents())
            finally:  # the other hosts report even if the chief could not write
                reports = exchange.collect(self._format_name("written"), "")[1:]
            for host, report in enumerate(map(json.loads, reports), start=1):
                listed |= self._check_seen(host, report)
            manifest.commit(self._step, listed, self._marker)
        exchange.announce(self._format_name("ended"), "{}")

    def as_other(self, exchange: Exchange, index: int) -> None:
        """Writes this process's files, and waits until the chief has made the checkpoint valid.

        Args:
            exchange: passes texts to the chief.
            index: the index of this process.

        Raises:
            OSError: a process could not write its files; the checkpoint is not valid.
        """
        begun = _parse_success(exchange.announce(self._format_name("begun"), ""))
        contents = {
            f"{group}-{index}-{begun['save']}.safetensors": _list_blocks(copied)
            for group, copied in self._copies.items()
            if copied
        }
        report: Mapping[str, object] = {}
        try:
            report = {"files": manifest.write_files(self._folder, contents)}
        except BaseException as error:
            report = _describe_failure(error)
            raise
        finally:
            exchange.collect(self._format_name("written"), json.dumps(report))
            _parse_success(exchange.announce(self._format_name("ended"), ""))

    def _remove_leftovers(self) -> None:
        self.begun = True
        manifest.remove_leftovers(self._folder, self._marker)

    def _collect_chief_contents(self) -> dict[str, Blocks]:
        contents = {
            f"{group}.safetensors": _list_blocks(copied) for group, copied in self._copies.items()
        }
        return {**contents, STATE: lambda: [self._state]}

    def _check_seen(self, host: int, report: dict) -> Listing:
        """Returns the files that another host wrote, after checking that this host sees them.

        Raises:
            OSError: the other host could not write them, or this host does not see them.
        """
        if _FAILED in report:
            raise OSError(f"host {host}: {report[_FAILED]}")
        listed = {name: [Block(*b) for b in blocks] for name, blocks in report["files"].items()}
        for name, blocks in listed.items():
            path = files.join(self._folder, name)
            if files.find_size(path) != sum(block.size for block in blocks):
                raise OSError(
                    f"host {host} wrote {name}, but the chief does not see it in {self._folder}: "
                    "all hosts must see the same workdir"
                )
        return listed

    def _format_name(self, moment: str) -> str:
        return f"checkpoint {self._folder} {moment}"

    @contextlib.contextmanager
    def _announcing(self, exchange: Exchange, moment: str) -> Iterator[None]:
        """Announces a failure in the `with` block to the other processes, so they do not wait."""
        try:
            yield
        except BaseException as error:
            exchange.announce(self._format_name(moment), json.dumps(_describe_failure(error)))
            raise


def _list_blocks(copied: Sequence[Copied]) -> Blocks:
    return safetensors.TensorFile(matching.group_by_name(copied)).iterate_blocks


def _describe_failure(error: BaseException) -> dict[str, str]:
    return {_FAILED: getattr(error, "strerror", None) or str(error) or repr(error)}


def _parse_success(text: str) -> dict:
    """Returns the chief's announcement; raises OSError if it is a failure."""
    found = json.loads(text)
    if _FAILED in found:
        raise OSError(found[_FAILED])
    return found
