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
            if started.is_set():
                log.exception("the server on the thread %s has ended", name)
            failures.append(error)
            started.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    if not started.wait(START_SECONDS):
        raise TimeoutError(f"the server on the thread {name} has not started after {START_SECONDS} s")
    if failures:
        raise failures[0]
