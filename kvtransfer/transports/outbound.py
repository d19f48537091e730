"""The sending half of the bulk engine: a few connections per peer, and credit, so that a slow peer stalls only itself.

A peer is greeted when something is first written to it: HELLO, WELCOME with the path it is to be, then a test of that
path's speed. A chunk counts against its connection's credit until it is acknowledged, so what is under way is bounded
and our memory is known to be free again. Out of a device's memory it is copied first, while others are on the wire. When a
connection breaks, or others have overtaken an answer that does not come, the peer is greeted afresh and what was not
acknowledged goes out again: the receiver knows each chunk by its number.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from kvtransfer.spans import PAGE
from kvtransfer.transports import BulkOptions, Event, Key, Link
from kvtransfer.transports.connection import WRITE, Connection, Nothing, Outgoing, Part, Side
from kvtransfer.transports.counters import Counters
from kvtransfer.transports.crew import Crew
from kvtransfer.transports.frame import (
    CHUNK_BYTES,
    CORRUPT,
    LANDED,
    LATE,
    MAX_REPLY_BYTES,
    OTHER,
    REFUSED,
    SPOKEN,
    STRAIGHT_BYTES,
    BadFrame,
    Chunk,
    Hello,
    pack_chunk,
    pack_hello,
    unpack_ack,
    unpack_other,
    unpack_welcome,
    versions,
)  # fmt: skip
from kvtransfer.transports.jobs import Job, Jobs, Piece
from kvtransfer.transports.memory import CpuMemory, DeviceMemory, Memory
from kvtransfer.transports.packer import Packer, Parcel

FETCH_BYTES = {"shm": 16 << 20, "cuda_ipc": 128 << 20}  # the same where nothing but headers is on the wire: about 3 ms each
CREDIT = 4  # chunks under way to a peer, or two a connection: with CHUNK_BYTES, the buffers that one that does not read costs
PROBE_BYTES = 16 << 20
IDLE_S = 300.0  # an unused connection is closed: decode workers come and go
RETEST_S = 5.0  # a peer that was too slow is tested again after so long
GREET_AGAIN_S = 0.1  # a peer whose connection breaks is greeted again, so long after the last time at the earliest
CONNECT_S = 2.0  # without an answer, then it is tried afresh: TCP waits twice as long each time
COMPUTING_MS = 1  # to look again whether what is to be sent has been computed
CLOSING_MS = 1  # and whether nobody reads any more what has been answered
GREETING_MS = 50  # and whether the other end's name is known
_REFUSALS = {
    LATE: "has closed the window",
    REFUSED: "refuses the bytes",
    CORRUPT: "received other bytes than were sealed",
}


@dataclass(slots=True, eq=False)
class Lane:
    """One connection, what is to go out on it, and what is under way (None: a probe), by chunk number."""

    connection: Connection
    most: int = CREDIT  # chunks at a time
    parcels: dict[int, Parcel] = field(default_factory=dict)
    under_way: dict[int, Piece | None] = field(default_factory=dict)
    moved_s: float = 0.0  # when its oldest chunk was answered, or it had none

    @property
    def credit(self) -> int:
        return self.most - len(self.parcels) - len(self.under_way)

    @property
    def idle(self) -> bool:
        return not self.parcels and not self.under_way


@dataclass(slots=True, eq=False)
class Peer:
    address: str
    moved_s: float  # when it last took something, or had nothing to take
    greeted_s: float = 0.0
    broken: bool = False  # one of its connections is
    lanes: list[Lane] = field(default_factory=list)
    path: str = ""  # once it has answered our HELLO
    device: bool = False
    why: str = ""
    link: Link | None = None  # once its test is over
    probe_begin_s: float = 0.0
    probes_left: int = 0
    probe_bytes: int = 0
    tested_s: float = 0.0

    @property
    def busy(self) -> bool:
        return any(not lane.idle or lane.connection.leaving for lane in self.lanes)  # it may answer what it does not read


class Outbound:
    """Everything here belongs to the engine's thread. `report` tells the owner of a link that was tested, and with None of one
    that is gone."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        password: bytes,
        memory: Memory,
        hello: Hello,
        options: BulkOptions,
        counters: Counters,
        emit: Callable[[Event], None],
        report: Callable[[str, Link | None], None],
        crew: Crew | None = None,
    ) -> None:
        self._selector = selector
        self._crew = crew
        self._lanes = options.lanes or (crew.threads if crew is not None else 1)
        self._password = password
        self._memory = memory
        self._packer = Packer(memory)
        self._hello = hello if options.path != "zeromq" else replace(hello, fd=0)
        self._options = options
        self._counters = counters
        self._report = report
        self._numbers = count(1)
        self._jobs = Jobs(emit, self._numbers)
        self._peers: dict[str, Peer] = {}
        self._parcels: deque[tuple[Lane, Parcel]] = deque()  # not sent yet, in the order in which their copies end

    def write(self, job: Job) -> None:
        peer = self._peers.get(job.peer)
        if peer is not None and not peer.busy and not self._jobs.waiting(job.peer):
            peer.moved_s = time.monotonic()
        self._jobs.add(job)

    def cancel(self, key: Key) -> None:
        self._jobs.cancel(key)

    def turn(self, now_s: float, idle: bool) -> None:
        """Begins what peers have credit for, a chunk per connection, and sends what is copied; when there is nothing else to
        do (`idle`), it waits for one copy."""
        for peer in list(self._peers.values()):
            self._look_after(peer, now_s)
        copying = len(self._parcels)
        for address in self._jobs.peers():
            self._serve(address, now_s)
        self._send_parcels(idle=idle and len(self._parcels) == copying)
        self._expire(now_s)
        self._jobs.settle()

    def _look_after(self, peer: Peer, now_s: float) -> None:
        for lane in peer.lanes:
            if lane.connection.tend() and not peer.broken:
                peer.greeted_s = now_s  # a name server may take its time
            elif not lane.connection.up and now_s - peer.greeted_s >= CONNECT_S:
                lane.connection.close("it does not answer")
        peer.broken |= any(lane.connection.broken for lane in peer.lanes)
        if any(lane.connection.turned_away for lane in peer.lanes):
            self._shut_out(peer, now_s)
        elif peer.broken and now_s - peer.greeted_s >= GREET_AGAIN_S:
            self._reconnect(peer, now_s)

    def wait_ms(self) -> int:
        """How long the engine may sleep: 0 when something could be sent now, or is being copied."""
        if self._parcels:
            return 0
        open_peers = [peer for peer in map(self._peers.get, self._jobs.peers()) if peer is not None and self._can_send(peer)]
        if open_peers:
            return 0 if any(map(self._computed, open_peers)) else COMPUTING_MS
        if self._jobs.closing:
            return CLOSING_MS
        if any(not lane.connection.up for peer in self._peers.values() for lane in peer.lanes):
            return GREETING_MS
        return 250 if self._jobs.peers() or any(peer.busy for peer in self._peers.values()) else 10_000

    def close(self) -> None:
        """Waits for what the device still reads."""
        for _, parcel in self._parcels:
            with suppress(Exception):
                parcel.wait()
        for peer in self._peers.values():
            self._drop_lanes(peer)

    # --- a peer's life

    def _serve(self, address: str, now_s: float) -> None:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, now_s)
        if peer.link is not None and not peer.link.usable and now_s - peer.tested_s < RETEST_S:
            self._jobs.lose_peer(address, peer.link.reason)
        elif not peer.lanes or (peer.link is not None and not peer.link.usable):
            self._drop_lanes(peer)
            peer.link = None
            self._greet(peer, now_s)  # from the start: whether its path is what was asked for is found out with WELCOME
        elif self._can_send(peer):
            self._begin(peer, now_s)

    def _greet(self, peer: Peer, now_s: float) -> None:
        peer.path, peer.moved_s, peer.greeted_s, peer.broken = "", now_s, now_s, False
        try:
            peer.lanes = [self._connect(peer)]
        except ValueError as error:
            self._jobs.lose_peer(peer.address, f"cannot connect to {peer.address!r}: {error}")
            self._forget(peer)
        else:
            peer.lanes[0].connection.send(pack_hello(self._hello))

    def _welcomed(self, peer: Peer, frame: bytes, now_s: float) -> None:
        welcome = unpack_welcome(frame)
        if peer.path:
            return
        peer.path, peer.why, peer.device = welcome.path, welcome.reason, welcome.device
        if self._options.path == "zeromq":
            peer.why = "as asked for"  # the peer only sees that no memory is offered
        if self._options.path not in ("auto", peer.path):
            link = Link(peer.path, 0.0, f"{SPOKEN[self._options.path]} is asked for and cannot be had: {peer.why}", False)
            self._tested(peer, link, now_s)
            return
        more = self._lanes - 1 if peer.path == "zeromq" else 0
        peer.lanes += [self._connect(peer) for _ in range(more)]
        for lane in peer.lanes:
            lane.most = max(2, CREDIT // len(peer.lanes))
        peer.greeted_s = now_s  # they have as long to connect as the first one
        if peer.link is None or peer.link.path != peer.path or not peer.link.usable:
            self._test(peer, now_s)

    def _turned_away(self, peer: Peer, frame: bytes, now_s: float) -> None:
        theirs = unpack_other(frame)
        if peer.path or (peer.link is not None and not peer.link.usable):  # which has been said
            raise BadFrame("another version, of who has answered us")
        self._tested(peer, Link("", 0.0, f"{peer.address} speaks {versions(theirs)}", False), now_s)

    def _shut_out(self, peer: Peer, now_s: float) -> None:
        """It would be the same again."""
        self._drop_lanes(peer)
        who = f"{peer.address} and we turn each other away: give both the same --cluster-key, or neither one"
        self._tested(peer, Link("", 0.0, who, False), now_s)

    def _test(self, peer: Peer, now_s: float) -> None:
        """Sends page 0, which is nobody's, a few times over all connections; the last answer ends the test."""
        row_bytes = self._hello.rows["page"][1]
        name = self._name(peer)
        pages = max(1, min(FETCH_BYTES.get(peer.path, CHUNK_BYTES) // row_bytes, 256 if name else 16))
        spans = np.array([(PAGE, 0, 0, row_bytes, 0)] * pages, dtype=np.uint32)
        peer.link, peer.probe_begin_s, peer.tested_s, peer.moved_s = None, time.perf_counter(), now_s, now_s
        rounds = max(1, min(PROBE_BYTES // (row_bytes * pages), CREDIT))
        data = np.zeros(row_bytes, dtype=np.uint8)
        for lane in peer.lanes:
            lane.moved_s = now_s
        for _ in range(rounds):
            for lane in peer.lanes:
                chunk = Chunk((0, 0), next(self._numbers), spans, name, probe=True)
                payload: list[list[Part]] = [] if name else [[(data, None)]] * pages
                lane.connection.send(pack_chunk(chunk), payload)
                lane.under_way[chunk.number] = None
        peer.probes_left = rounds * len(peer.lanes)
        peer.probe_bytes = peer.probes_left * row_bytes * pages

    def _tested(self, peer: Peer, link: Link, now_s: float) -> None:
        peer.link, peer.tested_s = link, now_s
        self._report(peer.address, link)
        if not link.usable:
            self._jobs.lose_peer(peer.address, link.reason)

    def _reconnect(self, peer: Peer, now_s: float) -> None:
        """A connection broke: starts over, and what was under way goes out again."""
        moved_s, wanted = peer.moved_s, peer.busy or self._jobs.waiting(peer.address)
        self._drop_lanes(peer)
        if wanted:
            self._greet(peer, now_s)
            peer.moved_s = moved_s  # a peer that does nothing but break connections is not alive
        else:
            self._forget(peer)

    def _expire(self, now_s: float) -> None:
        """Gives up on peers that took nothing for too long, and forgets those that nothing was sent to for long."""
        for peer in list(self._peers.values()):
            quiet_s = now_s - peer.moved_s
            if peer.busy or self._jobs.waiting(peer.address):
                if quiet_s <= self._options.stall_s:
                    if any(lane.under_way and now_s - lane.moved_s > self._options.stall_s for lane in peer.lanes):
                        self._reconnect(peer, now_s)  # an answer that others have overtaken does not come any more
                    continue
                self._drop_lanes(peer)
                self._jobs.lose_peer(peer.address, f"{peer.address} took nothing for {quiet_s:.1f} s")
            elif quiet_s <= IDLE_S:
                continue
            self._drop_lanes(peer)
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.address]
        self._report(peer.address, None)

    def _drop_lanes(self, peer: Peer) -> None:
        for lane in peer.lanes:
            lane.connection.close()
            for piece in lane.under_way.values():
                if piece is not None:
                    self._jobs.send_again(piece)
            for parcel in lane.parcels.values():
                parcel.piece.trackers.append(parcel)
                self._jobs.send_again(parcel.piece)
            lane.parcels.clear()
        peer.lanes = []

    # --- sending

    def _name(self, peer: Peer) -> bytes:
        """Of the memory that a peer fetches from; b"" when bytes are sent to it."""
        return b"" if peer.path == "zeromq" else self._hello.memory_name

    def _chunk_bytes(self, peer: Peer, job: Job) -> int:
        """Of a chunk at most, unless one span is larger."""
        straight = isinstance(self._memory, CpuMemory) and not peer.device and job.seal is None
        return FETCH_BYTES.get(peer.path) or (STRAIGHT_BYTES if straight else CHUNK_BYTES)

    def _can_send(self, peer: Peer) -> bool:
        tested = peer.link is not None and peer.link.usable and peer.path and not peer.broken
        return bool(tested) and any(lane.credit > 0 for lane in peer.lanes)

    def _computed(self, peer: Peer) -> bool:
        """Whether the next chunk for it could be read now: waiting for it would hold up the others."""
        mark = self._jobs.next_mark(peer.address)
        return mark is None or self._memory.reached(mark)

    def _begin(self, peer: Peer, now_s: float) -> None:
        if not peer.busy:
            peer.moved_s = now_s
        for lane in peer.lanes:
            if lane.idle:
                lane.moved_s = now_s
            if lane.credit > 0 and self._computed(peer):
                piece = self._jobs.next_piece(peer.address, partial(self._chunk_bytes, peer))
                if piece is None:
                    return
                try:
                    parcel = self._parcel(peer, piece)
                except Exception as error:
                    self._lose(piece, error)
                    self._jobs.release(piece)
                else:
                    lane.parcels[piece.number] = parcel
                    self._parcels.append((lane, parcel))

    def _parcel(self, peer: Peer, piece: Piece) -> Parcel:
        name = self._name(peer)
        if piece.num_bytes > self._chunk_bytes(peer, piece.job) and len(piece.spans) > 1:
            raise ValueError("its peer has changed the path meanwhile, and this one takes smaller chunks")
        if piece.sums is None:  # anybody may welcome us the next time: a nonce under two headers would give the seal away
            piece.sums, piece.fetched = peer.device or isinstance(self._memory, DeviceMemory), bool(name)
        if piece.job.seal is not None and piece.fetched != bool(name):  # it may have landed, with the digest of the other path
            raise ValueError("its peer has changed the path meanwhile, and a sealed chunk has another digest on each")
        header = pack_chunk(Chunk(piece.job.key, piece.number, piece.spans, name, sums=piece.sums))
        make = self._packer.reference if name else self._packer.payload
        return make(piece, header, piece.sums)

    def _send_parcels(self, idle: bool) -> None:
        while self._parcels and (idle or self._parcels[0][1].done):
            idle = False
            lane, parcel = self._parcels.popleft()
            if lane.parcels.pop(parcel.piece.number, None) is None:
                continue  # its connection broke meanwhile
            try:
                self._send(lane, parcel)
            except Exception as error:
                self._lose(parcel.piece, error)
                if parcel.piece.number not in lane.under_way:  # else its answer comes
                    self._jobs.release(parcel.piece)

    def _send(self, lane: Lane, parcel: Parcel) -> None:
        piece = parcel.piece
        frames, begin_digest = parcel.pack()
        if any(isinstance(tracker, Outgoing) for tracker in piece.trackers):
            self._counters.add("chunks_resent")
        piece.trackers.append(lane.connection.send(parcel.header, frames))
        lane.under_way[piece.number] = piece
        self._counters.add("chunks_sent")
        piece.made = begin_digest()

    def _lose(self, piece: Piece, error: Exception) -> None:
        """Whatever it is (a device fault, no memory), it costs this hand-off only."""
        self._jobs.lose(piece.job.key, f"cannot be sent: {type(error).__name__}: {error}")

    # --- what peers say

    def _hear(self, peer: Peer, lane: Lane, frame: bytes) -> None:
        if lane not in peer.lanes:
            return
        now_s = time.monotonic()
        try:
            if frame.startswith(b"pdW2"):
                self._welcomed(peer, frame, now_s)
            elif frame.startswith(OTHER):
                self._turned_away(peer, frame, now_s)
            else:
                self._acked(peer, lane, frame, now_s)
        except BadFrame:
            self._counters.add("bad_frames")

    def _acked(self, peer: Peer, lane: Lane, frame: bytes, now_s: float) -> None:
        ack = unpack_ack(frame)
        if ack.number not in lane.under_way:
            raise BadFrame("an answer to nothing")
        peer.moved_s = now_s
        if ack.number == next(iter(lane.under_way)):
            lane.moved_s = now_s
        piece = lane.under_way.pop(ack.number)
        if piece is None:
            peer.probes_left -= 1
            if not peer.probes_left:
                self._measured(peer, now_s)
            return
        if ack.status != LANDED:
            why = f"{peer.address} {_REFUSALS[ack.status]} of this hand-off"
            self._jobs.lose(piece.job.key, why, corrupt=ack.status == CORRUPT, closed=ack.status == LATE)
            self._jobs.release(piece)
        else:
            if not all(tracker.done for tracker in piece.trackers):
                lane.connection.recall(WRITE)  # its last bytes have left, and the crew is about to look at them
            self._counters.add("bulk_bytes_sent", piece.num_bytes)
            self._landed(piece)

    def _landed(self, piece: Piece) -> None:
        try:
            piece.digest = piece.made()
        except Exception as error:
            self._lose(piece, error)
            self._jobs.release(piece)
        else:
            self._jobs.landed(piece)

    def _measured(self, peer: Peer, now_s: float) -> None:
        rate = peer.probe_bytes / (time.perf_counter() - peer.probe_begin_s) / 1e9
        floor = self._options.floor_gb_per_s
        slow = f"{peer.address} takes {rate:.2f} GB/s over {peer.path}, the floor is {floor:g} GB/s (--kv-floor)"
        self._tested(peer, Link(peer.path, rate, peer.why if rate >= floor else slow, rate >= floor, len(peer.lanes)), now_s)

    def _connect(self, peer: Peer) -> Lane:
        """Raises ValueError for an address that is none."""

        def begin(_: Connection, frame: bytes, more: bool) -> Nothing:
            return Nothing(partial(self._hear, peer, lane, frame))

        side = Side(False, self._password, MAX_REPLY_BYTES, MAX_REPLY_BYTES, begin, crew=self._crew)
        lane = Lane(Connection(side, self._selector))
        lane.connection.connect(peer.address)
        return lane
