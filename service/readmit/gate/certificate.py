"""The certificate with which the gate serves HTTPS."""

import ssl

from readmit.gate.settings import GateSettings
from weightcache.errors import ConfigError


def check(settings: GateSettings) -> None:
    """Find out whether HTTPS can be served as the settings say, if they do.

    Raises:
        ConfigError: ``tls``.
    """
    if settings.tls_cert is None and settings.tls_key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert or "", settings.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            "tls",
            f"the gate cannot serve HTTPS with {settings.tls_cert}",
            expected="a certificate chain and its private key, as PEM",
            found=error.strerror or str(error),
            remedy="Name the right files (tls_cert, tls_key)",
        ) from error
