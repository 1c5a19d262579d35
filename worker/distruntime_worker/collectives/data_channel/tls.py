"""The data channel tcp with encryption: TLS 1.3 between members, each with a certificate that it has made for
the group and no longer.

The certificates travel in the group's store, which only the session's workers write; each end takes the one
of the member that it expects, and no other. No authority vouches for anything.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import tempfile
from typing import final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from distruntime.wire.data_channel import Capabilities, Membership

from .connection import Unproven, private_folder
from .sockets import SocketChannel

# The clocks of two machines may differ, and a certificate is of use for as long as its group alone.
_BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
_END = datetime.datetime(2200, 1, 1, tzinfo=datetime.timezone.utc)


@final
class TLS(SocketChannel):
    """As the data channel tcp, and encrypted, on one machine too."""

    capabilities = Capabilities(frozenset({"send"}))

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership, "tcp+tls", _Encryption())


@final
class _Encryption:
    """TLS 1.3 with certificates that both ends know."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, os.urandom(16).hex())])
        self._own = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._members: list[bytes] = []
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def about(self) -> str:
        return self._own.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def learn(self, about: list[str]) -> None:
        self._members = [ssl.PEM_cert_to_DER_cert(pem) for pem in about]
        self._contexts = {dialled: self._context(dialled) for dialled in (True, False)}

    def _context(self, dialled: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if dialled else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # There are no names: the other end's certificate is known.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=b"".join(self._members))
        if not dialled:
            # Nobody resumes a session.
            context.num_tickets = 0
        password = os.urandom(16).hex()
        private = self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode("ascii")),
        )
        # OpenSSL reads a key from a file only. This file is private, encrypted, and gone at once.
        with tempfile.NamedTemporaryFile(dir=private_folder()) as file:
            file.write(self.about().encode("ascii") + private)
            file.flush()
            context.load_cert_chain(file.name, password=password)
        return context

    def around(self, sock: socket.socket, dialled: bool) -> socket.socket:
        return self._contexts[dialled].wrap_socket(
            sock, server_side=not dialled, do_handshake_on_connect=False
        )

    def greet(self, sock: socket.socket, timeout: float) -> None:
        assert isinstance(sock, ssl.SSLSocket)
        sock.settimeout(timeout)
        try:
            sock.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise Unproven(f"its certificate is no member's: {error.verify_message}") from error
        except ssl.SSLError as error:
            # A member that has no place left just hangs up, and another try may mend that.
            if error.reason != "WRONG_VERSION_NUMBER":
                raise
            raise Unproven(f"it does not speak TLS: {error}") from error

    def check(self, sock: socket.socket, rank: int) -> None:
        assert isinstance(sock, ssl.SSLSocket)
        if sock.getpeercert(binary_form=True) != self._members[rank]:
            raise Unproven(f"its certificate is not that of rank {rank}")
