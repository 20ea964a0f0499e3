"""Makes a vLLM server a prefill node of Baton: a KV connector for vLLM, and a server of Baton's node protocol beside it.

vLLM imports `BatonConnector` from here. Everything but `connector` and `rows` works without vLLM and torch.
"""


def __getattr__(name):
    if name == "BatonConnector":
        from .connector import BatonConnector

        return BatonConnector
    raise AttributeError(name)
