"""TensorFlow's own `gs://` on loopback: a proxy that terminates TLS for the emulated storage.

TensorFlow's file system has no setting for the address, but it reads a proxy (https_proxy) and a
certificate authority (CURL_CA_BUNDLE) from the environment.
"""

import contextlib
import datetime
import http.server
import ssl
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.fakes import fake_storage
from tests.support.fakes.fake_storage import FakeStorage

HOST = "*.googleapis.com"
TOKEN = "a-token-that-nobody-may-see"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[FakeStorage, dict[str, str]]]:
    """Serves a bucket to TensorFlow and to Google's client; yields it and the environment to set.

    Args:
        folder: for the certificates.
    """
    authority, certificate = _certificates(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with fake_storage.serving() as service:
        inside = type("Inside", (fake_storage.Handler,), {"service": service, "scheme": "https"})

        class Proxy(http.server.BaseHTTPRequestHandler):
            def do_CONNECT(self):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                self.close_connection = True
                with contextlib.suppress(OSError):
                    connection = context.wrap_socket(self.connection, server_side=True)
                    inside(connection, self.client_address, self.server)

            def log_message(self, *_):
                pass

        with fake_storage.running(Proxy) as port:
            yield (
                service,
                {
                    "https_proxy": f"http://127.0.0.1:{port}",
                    "no_proxy": "127.0.0.1",
                    "CURL_CA_BUNDLE": str(authority),
                    "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN,
                    "NO_GCE_CHECK": "true",
                    "STORAGE_EMULATOR_HOST": service.url,
                },
            )


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[tuple[FakeStorage, dict[str, str]]]:
    """Serves as `serving` does, also to this process: TensorFlow reads its environment each time.

    Args:
        folder: for the certificates.
    """
    with serving(folder) as (service, environment), fake_storage.in_this_process(environment):
        yield service, environment


def _certificates(folder: Path) -> tuple[Path, Path]:
    """Writes a certificate authority, and a certificate signed by it with its key; returns both."""
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name, key, issuer, issuers_key, *extensions):
        def named(text):
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(issuers_key, hashes.SHA256()).public_bytes(_PEM)

    roots_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = certificate("root", roots_key, "root", roots_key, x509.BasicConstraints(True, None))
    names = x509.SubjectAlternativeName([x509.DNSName(HOST)])
    leaf = certificate("leaf", key, "root", roots_key, names)
    private = key.private_bytes(
        _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "authority.pem").write_bytes(root)
    (folder / "server.pem").write_bytes(leaf + private)
    return folder / "authority.pem", folder / "server.pem"


_PEM = serialization.Encoding.PEM
