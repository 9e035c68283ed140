"""Converts the TLS settings to uvicorn's options, and checks the certificate files."""

import ssl
from typing import TypedDict

from mmengine.errors import ConfigError
from mmengine.server.settings import ServerSettings


class TlsOptions(TypedDict):
    ssl_certfile: str | None
    ssl_keyfile: str | None
    ssl_keyfile_password: str | None
    ssl_ca_certs: str | None
    ssl_cert_reqs: int


def tls_options(settings: ServerSettings) -> TlsOptions:
    """Return uvicorn's TLS options. With `ssl_ca_certs`, clients must present a certificate from an authority
    in this file.
    """
    return TlsOptions(
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        ssl_keyfile_password=settings.ssl_keyfile_password or None,
        ssl_ca_certs=settings.ssl_ca_certs or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
    )


def check_tls(settings: ServerSettings) -> None:
    """Raise ConfigError if the TLS files cannot be read, or if the key does not match the certificate."""
    if not settings.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without this callback, OpenSSL would ask for a missing password at the terminal.
        context.load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, lambda: settings.ssl_keyfile_password
        )
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"--ssl-certfile {settings.ssl_certfile} and --ssl-keyfile {settings.ssl_keyfile} cannot be used "
            f"({why}); give PEM files that belong together, and --ssl-keyfile-password for an encrypted key"
        ) from None
    try:
        if settings.ssl_ca_certs:
            context.load_verify_locations(settings.ssl_ca_certs)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"--ssl-ca-certs {settings.ssl_ca_certs} cannot be used ({why})") from None
