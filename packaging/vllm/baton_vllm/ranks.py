"""Tensor parallelism: each rank of vLLM has some heads of every row and state, and rank 0 gathers them.

Rank 0 runs the node. At the start the other ranks connect to it, by a Unix socket in a folder that only their user can enter and
that is removed then. For each handoff, rank 0 sends each rank one end of a new pair of sockets. Closing it ends the handoff on that
rank. The ranks are processes of one server, so there are no versions. A rank answers in full or closes the connection:

    open   the handoff's id (16 bytes), tokens (u32)    →  one byte
    rows   0, layer, p0, p1 (u32 each)                  →  length (u32), K, V
    states 1, number of the linear layer, 0, 0          →  length (u32), inputs of the convolution in three parts, the memory
"""

import asyncio
import contextlib
import enum
import hmac
import logging
import os
import shutil
import socket
import struct
import tempfile
import threading
import time

import numpy as np

from .errors import NodeError, Unsupported, unavailable
from .loops import run_on_thread

log = logging.getLogger("vllm.baton")

# Keeps out other processes of the same user.
SECRET_BYTES = 32
HELLO, OPEN = struct.Struct(f"<{SECRET_BYTES}sI"), struct.Struct("<16sI")
ASK, LENGTH = struct.Struct("<IIII"), struct.Struct("<I")
IS_OPEN = b"\1"
# The longest that a rank waits for another one to open a handoff, to ask, to answer, or to take an answer. A decode node gives up
# after 5 s of silence.
RANK_SECONDS = 4.0
# How long rank 0 waits for the other ranks at the start.
MEET_SECONDS = 60.0


class Wanted(enum.IntEnum):
    """What rank 0 asks for."""

    ROWS = 0
    STATES = 1


def ranks_with_heads(n_ranks, n_values, n_values_each):
    """The ranks that together have each head once, in the order of the heads.

    vLLM gives neighbouring ranks copies of a head if there are fewer heads than ranks.
    """
    n_parts = n_values // n_values_each
    if n_parts * n_values_each != n_values or n_parts < 1 or n_ranks % n_parts:
        raise Unsupported(f"{n_ranks} ranks have {n_values_each} values each of the model's {n_values}")
    return range(0, n_ranks, n_ranks // n_parts)


class Meeting:
    """Where the other ranks connect to rank 0. `place` is what they must know. Leaving it removes the folder."""

    def __init__(self):
        self._folder = tempfile.mkdtemp(prefix="baton-ranks-")
        self.place = os.path.join(self._folder, "rank-0"), os.urandom(SECRET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self.place[0])
            self._listener.listen()
        except OSError as error:
            self.__exit__()
            raise Unsupported(f"the ranks cannot meet at {self.place[0]}: {error}; TMPDIR names another folder") from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, ranks):
        """The connections of these ranks, in their order. Errors: one of them does not come."""
        connected, deadline = {}, time.monotonic() + MEET_SECONDS
        try:
            while not connected.keys() >= set(ranks):
                self._listener.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = self._listener.accept()
                rank = self._rank_of(connection)
                if rank is None or rank in connected:
                    connection.close()
                else:
                    connected[rank] = connection
        except TimeoutError:
            raise TimeoutError(f"of vLLM's ranks {list(ranks)} only {sorted(connected)} have connected to rank 0") from None
        return [connected[rank] for rank in ranks]

    def _rank_of(self, connection):
        """The rank that has connected; `None`: it is something else."""
        with contextlib.suppress(OSError):
            secret, rank = HELLO.unpack(receive(connection, HELLO.size, time.monotonic() + RANK_SECONDS))
            if hmac.compare_digest(secret, self.place[1]):
                return rank
        return None


def connect(place, rank):
    """This rank's connection to rank 0. Errors: rank 0 has given up."""
    path, secret = place
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(HELLO.pack(secret, rank))
    return connection


class Refusal(Exception):
    """Why a rank closes a connection."""


class RankServer:
    """Serves the heads of a rank, once they are computed here: ranks of one step may be some layers apart."""

    def __init__(self, rank_0, layout, n_ctx, rows, handoffs):
        self._rank_0, self._layout, self._n_ctx = rank_0, layout, n_ctx
        self._rows, self._handoffs = rows, handoffs
        self._running = set()

    def start(self):
        """Serves on a thread of its own."""
        run_on_thread("baton-rank", self._run)

    async def _run(self, started):
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._rank_0.setblocking(False)
        loop.add_reader(self._rank_0, self._take, loop, ended)
        started.set()
        await ended.wait()

    def _take(self, loop, ended):
        """A handoff's connection comes, or rank 0 has ended."""
        try:
            came, connections, _, _ = socket.recv_fds(self._rank_0, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            came, connections = b"", ()
        for connection in connections:
            serving = loop.create_task(self._serve(socket.socket(fileno=connection)))
            self._running.add(serving)
            serving.add_done_callback(self._running.discard)
        if not came:
            loop.remove_reader(self._rank_0)
            ended.set()

    async def _serve(self, connection):
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        handoff = None
        try:
            handoff = await self._open(reader)
            writer.write(IS_OPEN)
            while True:
                wanted = ASK.unpack(await reader.readexactly(ASK.size))
                pieces = await self._copy(handoff, *wanted)
                writer.write(LENGTH.pack(sum(map(len, pieces))))
                writer.writelines(pieces)
                await asyncio.wait_for(writer.drain(), RANK_SECONDS)
        except (Refusal, NodeError, asyncio.TimeoutError) as refusal:
            log.warning("Baton: this rank ends a handoff: %s", str(refusal) or "rank 0 does not go on")
        except (OSError, EOFError):
            # Rank 0 has closed the handoff, or its prompt was lost, which rank 0 knows as well.
            pass
        finally:
            if handoff is not None:
                self._handoffs.close(handoff)
            writer.close()

    async def _open(self, reader):
        opening = await asyncio.wait_for(reader.readexactly(OPEN.size), RANK_SECONDS)
        handoff, n_tokens = OPEN.unpack(opening)
        if not 1 <= n_tokens <= self._n_ctx:
            raise Refusal(f"a prompt of {n_tokens} tokens")
        return self._handoffs.open(handoff.hex(), n_tokens, False, asyncio.get_running_loop())

    async def _copy(self, handoff, wanted, layer, p0, p1):
        if wanted == Wanted.ROWS:
            fits = p0 < p1 <= min(handoff.n_tokens, p0 + self._layout.max_frame_positions)
            if not fits or layer >= self._layout.n_layers:
                raise Refusal(f"positions {p0} to {p1} of layer {layer} are wanted of {handoff.n_tokens} positions")
            await self._computed(handoff, layer, p1)
            return await copy_soon(handoff, self._rows.copy, handoff, layer, p0, p1)
        if wanted != Wanted.STATES or layer >= len(self._layout.linear):
            raise Refusal(f"{wanted} is wanted of layer {layer}")
        await self._computed(handoff, self._layout.linear[layer].n_before, handoff.n_tokens)
        return await copy_soon(handoff, self._rows.copy_states, handoff, layer)

    @staticmethod
    async def _computed(handoff, layer, p1):
        """Waits until this rank has a layer of the positions before `p1`."""
        deadline = time.monotonic() + RANK_SECONDS
        while not handoff.error and not handoff.progress.has(layer, p1):
            if not await handoff.change(deadline - time.monotonic()):
                raise Refusal(f"it took more than {RANK_SECONDS} s to have layer {layer}")


class Connections:
    """Those of one handoff to the other ranks."""

    def __init__(self):
        self.to_ranks = []
        # Held while rows are asked for, so that no other copy reads their answers.
        self.asking = threading.Lock()


class Gathered:
    """What the node sends of a handoff: this rank's rows and states, beside those of the other ranks.

    `ranks` are the connections to those that are asked, each with whether it has heads of rows that no rank before it has.
    `shape` is that of the model's linear layers.

    Each rank holds its own `handoff.copying` while it copies its own rows, and nobody holds one while it waits for a rank.
    """

    def __init__(self, rows, layout, ranks=(), shape=None):
        self._rows, self._row_bytes = rows, layout.row_bytes // (1 + sum(has_rows for _, has_rows in ranks))
        self._ranks, self._shape = ranks, shape
        for rank, _ in ranks:
            rank.settimeout(RANK_SECONDS)
        self._connections = {}
        self.n_positions = rows.n_positions

    def open(self, handoff):
        """Opens the handoff on the other ranks before vLLM gets the prompt. Errors: one of them does not answer."""
        connections = self._connections[handoff.id] = Connections()
        deadline = time.monotonic() + RANK_SECONDS
        try:
            for rank, _ in self._ranks:
                here, there = socket.socketpair()
                connections.to_ranks.append(here)
                with there:
                    socket.send_fds(rank, [b"\0"], [there.fileno()])
                here.settimeout(RANK_SECONDS)
                here.sendall(OPEN.pack(bytes.fromhex(handoff.id), handoff.n_tokens))
            for connection in connections.to_ranks:
                receive(connection, len(IS_OPEN), deadline)
        except OSError as error:
            log.warning("Baton: another rank does not answer: %s", error)
            raise unavailable("another rank of vLLM does not answer") from None

    def close(self, handoff):
        """Closes the handoff on the other ranks. A copy that waits for one of them ends with an error."""
        connections = self._connections.pop(handoff.id, None)
        if connections is None:
            return
        for connection in connections.to_ranks:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with connections.asking:
            for connection in connections.to_ranks:
                connection.close()

    def copy(self, handoff, layer, p0, p1, deadline):
        """The bytes of K and of V of a layer's positions. Errors: the handoff is closed; another rank has lost them, or does not
        answer until `deadline`."""
        has_rows = [has_rows for _, has_rows in self._ranks]
        own = self._rows.copy, handoff, layer, p0, p1
        sizes = [(p1 - p0) * self._row_bytes] * 2
        parts = self._gather(handoff, has_rows, ASK.pack(Wanted.ROWS, layer, p0, p1), sizes, own, deadline)
        return [side_by_side(pieces, p1 - p0) for pieces in zip(*parts)] if len(parts) > 1 else parts[0]

    def copy_states(self, handoff, number, deadline):
        """The bytes of both states of a linear layer after the whole prompt. Errors: as of `copy`."""
        all_ = [True] * len(self._ranks)
        sizes = self._shape.of_rank(1 + len(self._ranks)).part_bytes
        own = self._rows.copy_states, handoff, number
        parts = self._gather(handoff, all_, ASK.pack(Wanted.STATES, number, 0, 0), sizes, own, deadline)
        return self._shape.joined(parts)

    def _gather(self, handoff, asked, question, sizes, own, deadline):
        """The parts of this rank and of those that are asked, each in pieces of these sizes."""
        connections = self._connections.get(handoff.id)
        if connections is None:
            raise ConnectionAbortedError("the handoff is closed")
        with connections.asking:
            others = [connection for connection, is_asked in zip(connections.to_ranks, asked) if is_asked]
            try:
                for connection in others:
                    connection.sendall(question)
                parts = [copy_own(handoff, *own)]
                return parts + [receive_pieces(connection, sizes, deadline) for connection in others]
            except OSError as error:
                raise ConnectionAbortedError(f"a rank of vLLM does not answer: {error}") from None


def copy_own(handoff, copy, *what):
    """This rank's part. vLLM's thread may wait for this copy, and for nothing longer."""
    with handoff.copying:
        if handoff.error or handoff.closed:
            raise ConnectionAbortedError(f"a prompt was lost before it was sent: {handoff.error or 'it is closed'}")
        return copy(*what)


async def copy_soon(handoff, copy, *what):
    return await asyncio.get_running_loop().run_in_executor(None, copy_own, handoff, copy, *what)


def receive_pieces(connection, sizes, deadline):
    """A rank's pieces, of these lengths."""
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size, deadline))
    if length != sum(sizes):
        raise ConnectionAbortedError(f"it sends {length} bytes instead of {sum(sizes)}")
    return [receive(connection, size, deadline) for size in sizes]


def receive(connection, n_bytes, deadline):
    received = bytearray(n_bytes)
    left = memoryview(received)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("it took too long")
        connection.settimeout(seconds)
        n = connection.recv_into(left)
        if n == 0:
            raise ConnectionAbortedError("it has closed the connection")
        left = left[n:]
    return received


def side_by_side(pieces, n_positions):
    """The rows of each position, rank by rank."""
    return np.concatenate([np.frombuffer(piece, np.uint8).reshape(n_positions, -1) for piece in pieces], axis=1).reshape(-1).data
