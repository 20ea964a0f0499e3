"""Certificates for servers that tests start. Needs the command `openssl`."""

import subprocess


def self_signed(folder, name):
    """A certificate of `localhost` and its key: the paths of two PEM files. It is no authority, as Baton wants it."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    about = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command, *about, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return str(cert), str(key)
