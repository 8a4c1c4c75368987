"""The files that are sent to a rented machine: tftpu itself, the user's folder, and versions.

The files are in a folder of the workdir that is named after their hash. The request, which only its
sender can write, has the SHA-256 of each file, so that a machine installs and runs exactly these
bytes or nothing.
"""

import dataclasses
import hashlib
import shlex
import sys
import tempfile
from pathlib import Path

from tftpu.errors import UserError, counted
from tftpu.launch.cloud.shipping import code_folder, code_imports, own_wheel, packages
from tftpu.storage import buckets

_CODE = "code.tar.gz"
_CONSTRAINTS = "constraints.txt"
_OVERRIDES = "overrides.txt"
_SHOWN = 30  # maximum number of files that the list of the config's folder names
# Overrides that never install these packages, even if another package requires them: they would
# overwrite files of the TensorFlow wheel that the engine's extra installs.
_NEVER = {
    "tensorflow": "tensorflow; python_version < '3'\ntensorflow-cpu; python_version < '3'\n",
    "jax": "tensorflow; python_version < '3'\ntensorflow-tpu; python_version < '3'\n",
}


@dataclasses.dataclass(frozen=True)
class Shipment:
    """The files to upload, and how the machine uses them.

    Attributes:
        files: the contents of the files, by name.
        package: name of the wheel in `files`; or a wheel in a bucket or a requirement, if the user
            gives one.
        config: name of a config of tftpu, or file name of the user's config.
        folder: absolute path of the folder of the user's config; None for a config of tftpu.
        code: the size in bytes of each file to send from that folder, by path.
        engine: the name of the engine that trains on the machine.
    """

    files: dict[str, bytes]
    package: str
    config: str
    folder: Path | None
    code: dict[str, int]
    engine: str

    @property
    def sums(self) -> str:
        """The SHA-256 of the files, in the format of `sha256sum`."""
        return "".join(
            f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in self.files.items()
        )

    @property
    def data(self) -> dict[str, int]:
        """The sizes in bytes of data in the config's folder; see `code_folder.measure_data`."""
        return code_folder.measure_data(self.code)

    def resolve_address(self, workdir: str) -> str:
        """Returns the "gs://" folder of the files, which is in the run's workdir."""
        return f"{workdir}/launch/code-{hashlib.sha256(self.sums.encode()).hexdigest()[:16]}"

    def upload(self, workdir: str) -> None:
        """Uploads the files that are not in the bucket yet."""
        with tempfile.TemporaryDirectory() as scratch:
            paths = {name: Path(scratch, name) for name in self.files}
            for name, data in self.files.items():
                paths[name].write_bytes(data)
            buckets.upload(paths, self.resolve_address(workdir))

    def build_script(self, workdir: str, arguments: list[str]) -> str:
        """Returns shell functions that fetch the files, install them, and train; quotes all values.

        Args:
            workdir: folder of the run in a bucket.
            arguments: further flags of `tftpu train`.
        """
        values = {
            "shipped": self.resolve_address(workdir),
            "sums": self.sums,
            "package": self.package,
            "extras": ",".join(packages.list_extras(self.engine)),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "code": code_folder.choose_name(self.folder) if self.folder else "",
        }
        lines = [f"{key}={shlex.quote(value)}" for key, value in values.items()]
        argv = shlex.join(["train", f"--config={self.config}", *arguments])
        body = (Path(__file__).parent / "machine.sh").read_text()
        return "\n".join([*lines, f"arguments=({argv})", body])

    def describe(self, workdir: str) -> str:
        """Returns lines that say what is sent, how large it is, and what the machine installs."""
        lines = [f"tftpu uploads to {self.resolve_address(workdir)}:"]
        lines += [
            f"  {name}  {_format_size(len(data))}  sha256 {hashlib.sha256(data).hexdigest()}"
            for name, data in self.files.items()
        ]
        if self.folder:
            total = _format_size(sum(self.code.values()))
            lines.append(f"{_CODE} is {self.folder}, {counted(len(self.code), 'file')} of {total}:")
            shown = list(self.code.items())[:_SHOWN]
            lines += [f"  {ascii(name)[1:-1]}  {_format_size(size)}" for name, size in shown]
            if len(self.code) > _SHOWN:
                lines.append(f"  ... and {len(self.code) - _SHOWN} more")
        origin = "the tftpu that is running here" if self.package in self.files else "--package"
        lines.append(f"The machine installs {ascii(self.package)[1:-1]} ({origin}),")
        lines.append(
            f"  {packages.describe_driver(self.engine)}, and the versions of this environment:"
        )
        return "\n".join([*lines, f"  {', '.join(packages.list_pins())}"]) + "\n"


def pack(config: str, package: str | None, engine: str = "tensorflow") -> Shipment:
    """Returns the files to send for a config.

    Args:
        config: name of a config of tftpu, or path of the user's file, whose folder is sent.
        package: what to install instead of the running tftpu: the path of a wheel, a wheel in a
            bucket, or a requirement; None installs the running one.
        engine: the name of the engine that trains on the machine.

    Raises:
        UserError: there is no such wheel, the folder holds a secret or is too large, git ignores
            the config, code is not valid Python, or a package would be missing.
    """
    files, code, folder = {}, {}, None
    if package is None:
        package = own_wheel.NAME
        files[package] = own_wheel.build()
    elif package.endswith(".whl") and Path(package).is_file():
        files[Path(package).name] = Path(package).read_bytes()
        package = Path(package).name
    elif "://" not in package and (
        package.endswith((".whl", ".tar.gz")) or package[:1] in (".", "/", "~")
    ):
        raise UserError(
            f"--package={package} is no wheel on this machine: give the path of a wheel, "
            "gs://BUCKET/NAME.whl, or a requirement such as 'tftpu[tpu]==1.0'."
        )
    if config.endswith(".py"):
        path = Path(config).absolute()
        folder, config = path.parent, path.name
        contents = code_folder.read_files(folder)
        if config not in contents:
            raise UserError(f"{path} is ignored by a .gitignore, so it would not be sent.")
        requirements = contents.get("requirements.txt", b"").decode(errors="replace")
        imports = code_imports.find_external(contents, config)
        packages.check(imports, requirements, code_folder.choose_name(folder), engine)
        code = {name: len(data) for name, data in contents.items()}
        files[_CODE] = code_folder.build_archive(code_folder.choose_name(folder), contents)
    files[_CONSTRAINTS] = "".join(f"{pin}\n" for pin in packages.list_pins()).encode()
    files[_OVERRIDES] = _NEVER[engine].encode()
    return Shipment(files, package, config, folder, code, engine)


def _format_size(count: int) -> str:
    return f"{count:,} bytes" if count < 1000 else f"{count / 1000:,.1f} kB"
