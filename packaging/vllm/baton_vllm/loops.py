"""Runs a server's event loop on a thread of its own, beside vLLM's."""

import asyncio
import logging
import threading

log = logging.getLogger("vllm.baton")

START_SECONDS = 30


def run_on_thread(name, serve):
    """Returns when `serve(started)` has set its event. Errors: those of its start."""
    started, failures = threading.Event(), []

    def run():
        try:
            asyncio.run(serve(started))
        except BaseException as error:
            failures.append(error)
            started.set()
            if not isinstance(error, OSError):
                log.exception("the server on the thread %s has ended", name)

    threading.Thread(target=run, name=name, daemon=True).start()
    started.wait(START_SECONDS)
    if failures:
        raise failures[0]
