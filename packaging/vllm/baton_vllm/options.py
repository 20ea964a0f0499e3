"""The connector's options, kv_connector_extra_config of vLLM. packaging/vllm/README.md explains each."""

import os
import ssl
from urllib.parse import urlsplit

from .errors import Unsupported

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# As of Baton's own processes. Whoever sees a proof of the key can try keys as fast as they hash.
MIN_KEY_CHARS = 16
OPTIONS = {
    "listen": "127.0.0.1:9000",
    "vllm": "http://127.0.0.1:8000",
    "kv_dtype": "f16",
    "tls_cert": None,
    "tls_key": None,
    "cluster_key_file": None,
    "allow_plain_http": False,
    "max_handoffs": 32,
    "overlap": True,
}


def read_options(given):
    """The options, checked. Errors: in words for the operator."""
    unknown = set(given) - set(OPTIONS)
    if unknown:
        raise Unsupported(f"kv_connector_extra_config: unknown keys {sorted(unknown)}; known are {sorted(OPTIONS)}")
    options = {**OPTIONS, **given}
    host, _, port = options["listen"].rpartition(":")
    if not host or not port.isdigit():
        raise Unsupported(f"listen is {options['listen']!r}, not HOST:PORT")
    options["listen"] = (host.strip("[]"), int(port))
    api = urlsplit(options["vllm"])
    if api.scheme != "http" or api.hostname not in LOOPBACK:
        raise Unsupported(f"vllm is {options['vllm']!r}: the connector reaches vLLM's API at http:// on this machine")
    options["vllm"] = (api.hostname, api.port or 8000)
    if options["kv_dtype"] not in ("f16", "bf16", "f32"):
        raise Unsupported(f"kv_dtype is {options['kv_dtype']!r}; f16, bf16 and f32 are possible")
    options["tls"] = read_tls(options["tls_cert"], options["tls_key"])
    if options["tls"] is None and options["listen"][0] not in LOOPBACK and not options["allow_plain_http"]:
        raise Unsupported("other machines can reach `listen`, and over plain HTTP the cluster key and the prompts could be read "
                          "on the way: give tls_cert and tls_key, or set allow_plain_http")
    options["key"] = read_key(options["cluster_key_file"])
    return options


def read_tls(cert, key):
    """What a server over TLS needs; `None` without a certificate."""
    if not cert and not key:
        return None
    if not cert or not key:
        raise Unsupported("tls_cert and tls_key belong together")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        tls.load_cert_chain(cert, key, password=refuse_encrypted)
    except OSError as error:
        raise Unsupported(f"tls_cert and tls_key cannot be used: {error}") from None
    tls.set_alpn_protocols(["http/1.1"])
    return tls


def refuse_encrypted():
    raise Unsupported("tls_key is encrypted; the connector needs one without a password")


def read_key(file):
    """The cluster's key."""
    key = os.environ.get("BATON_CLUSTER_KEY", "")
    if file:
        try:
            with open(file) as opened:
                key = opened.read().strip()
        except OSError as error:
            raise Unsupported(f"cluster_key_file cannot be read: {error}") from None
    if not key:
        raise Unsupported("a prefill node needs a cluster key: set BATON_CLUSTER_KEY, or cluster_key_file")
    if len(key) < MIN_KEY_CHARS:
        name = "the key of cluster_key_file" if file else "BATON_CLUSTER_KEY"
        raise Unsupported(f"{name} has {len(key)} characters and could be guessed: it needs {MIN_KEY_CHARS} at least. "
                          "`openssl rand -hex 32` prints one")
    return key
