"""The wire: one table of (value, bytes) in both directions, and bytes that are no frames."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblp import wire
from dblp.dtypes import BFLOAT16, FLOAT16
from dblp.errors import LocalProtocolError, PeerProtocolError
from dblp.wire import (
    Bitmap,
    Bye,
    End,
    Epoch,
    Frame,
    FrameReader,
    Hello,
    Probe,
    Ready,
    Refuse,
    Replicas,
    Start,
    State,
    Stop,
    Welcome,
    encode,
    encode_hint,
    parse_hint,
)

U32 = 0xFFFFFFFF
QUICK = settings(derandomize=True, deadline=None, max_examples=60)

TABLE: list[tuple[Frame, str]] = [
    (Hello(b"0123456789abcdef", 3, 1, b"{}"), "00000016 01 01 30313233343536373839616263646566 0003 0001 7b7d"),
    (Welcome(0xDEADBEEF, b""), "00000004 01 02 deadbeef"),
    (Refuse("zu groß".encode()), "00000008 01 03 7a752067726fc39f"),
    (Ready(138), "00000004 01 04 0000008a"),
    (Start(U32, 1.5, 1), "0000000d 01 05 ffffffff 3ff8000000000000 01"),
    (Probe(U32, 1, 2, 3), "0000000d 01 06 ffffffff 01 00000002 00000003"),
    (Bitmap(0, 0, U32, 1, b"\x80"), "0000000e 01 07 00000000 00 ffffffff 00000001 80"),
    (Stop(1, 0, 1, U32, 0xFFFF, 7, b"\xff\x01"), "00000012 01 08 00000001 00 01 ffffffff ffff 00000007 ff01"),
    (End(U32, 1, 0, 0.408), "0000000e 01 09 ffffffff 01 00 3fda1cac083126e9"),
    (Epoch(7, 930, b"\xab" * 32), "00000028 01 0a 00000007 000003a2" + "ab" * 32),
    (Replicas(7, 1), "00000005 01 0b 00000007 01"),
    (State(7, b"\x00\x00\x80\x3f"), "00000008 01 0c 00000007 0000803f"),
    (Bye(930), "00000004 01 0d 000003a2"),
]


@pytest.mark.parametrize(("frame", "text"), TABLE, ids=lambda value: type(value).__name__)
def test_frame_and_its_bytes(frame: Frame, text: str) -> None:
    data = bytes.fromhex(text)
    assert encode(frame) == data
    assert list(FrameReader().feed(data)) == [frame]
    assert parse_hint(U32, b"\xff\xff\xff\xff" + data) == frame
    assert encode_hint(U32, frame) == b"\xff\xff\xff\xff" + data


def test_table_has_every_type() -> None:
    assert {type(frame) for frame, _ in TABLE} == set(wire.FRAMES) == set(wire.Frame.__subclasses__())
    assert [frame.KIND for frame in wire.FRAMES] == list(range(1, 14))


CHUNK_HEADERS = [
    ((0xDEADBEEF, 0, 0, 0, 1456), "deadbeef 00000000 00000000 0000 05b0"),
    ((1, U32, 2999, 0xFFFF, 4), "00000001 ffffffff 00000bb7 ffff 0004"),
    ((0x01020304, 0x05060708, 0x090A0B0C, 0x0D0E, 0x0F10), "01020304 05060708 090a0b0c 0d0e 0f10"),
]


@pytest.mark.parametrize(("values", "text"), CHUNK_HEADERS)
def test_chunk_header_and_its_bytes(values: tuple[int, ...], text: str) -> None:
    data = bytes.fromhex(text)
    packets = np.zeros((2, 20), np.uint8)
    headers = wire.headers_of(packets)
    for name, value in zip(("session", "round", "sequence", "pass", "length"), values, strict=True):
        headers[name][1] = value
    assert packets[1, :16].tobytes() == data
    assert not packets[0].any()
    assert struct.unpack("!IIIHH", data) == values
    again = wire.headers_of(np.frombuffer(data + b"\0" * 4, np.uint8).reshape(1, 20))[0]
    assert tuple(int(field) for field in again) == values


def test_chunk_header_has_the_documented_offsets() -> None:
    offsets = {name: wire.HEADER.fields[name][1] for name in wire.HEADER.names}
    assert offsets == {"session": 0, "round": 4, "sequence": 8, "pass": 12, "length": 14}
    assert wire.HEADER.itemsize == wire.HEADER_BYTES == 16
    assert (wire.KEY_RANGE, wire.ROUND_RANGE) == ((4, 14), (4, 8))


@pytest.mark.parametrize(("mtu", "version", "values"), [(1500, 4, 364), (1500, 6, 359), (9000, 4, 2239), (576, 4, 133)])
def test_chunk_fills_a_packet(mtu: int, version: int, values: int) -> None:
    assert wire.chunk_values(mtu, version) == values
    assert wire.chunk_values(mtu, version, FLOAT16) == wire.chunk_values(mtu, version, BFLOAT16) == 2 * values
    assert mtu - 4 < wire.IP_UDP_BYTES[version] + 16 + 4 * values <= mtu


def test_ports_of_64_workers_do_not_meet() -> None:
    functions = (wire.server_data_port, wire.worker_data_port, wire.server_hint_port, wire.worker_hint_port)
    ports = [function(29500, rank) for function in functions for rank in range(1, 65)]
    assert len(set(ports) | {29500, 29500 + wire.TCP_DATA_OFFSET}) == 4 * 64 + 2
    assert [function(29500, 1) for function in functions] == [29601, 29701, 29801, 29901]


U32S, U16S, U8S = st.integers(0, U32), st.integers(0, 0xFFFF), st.integers(0, 255)
FLOATS = st.floats(allow_nan=False)
TAILS = st.binary(max_size=300)
FRAMES = st.one_of(
    st.builds(Hello, st.binary(min_size=16, max_size=16), U16S, U16S, TAILS),
    st.builds(Welcome, U32S, TAILS),
    st.builds(Refuse, TAILS),
    st.builds(Ready, U32S),
    st.builds(Start, U32S, FLOATS, U8S),
    st.builds(Probe, U32S, U8S, U32S, U32S),
    st.builds(Bitmap, U32S, U8S, U32S, U32S, TAILS),
    st.builds(Stop, U32S, U8S, U8S, U32S, U16S, U32S, TAILS),
    st.builds(End, U32S, U8S, U8S, FLOATS),
    st.builds(Epoch, U32S, U32S, st.binary(min_size=32, max_size=32)),
    st.builds(Replicas, U32S, U8S),
    st.builds(State, U32S, TAILS),
    st.builds(Bye, U32S),
)


@QUICK
@given(FRAMES)
def test_every_frame_survives_the_round_trip(frame: Frame) -> None:
    assert list(FrameReader().feed(encode(frame))) == [frame]
    assert parse_hint(9, encode_hint(9, frame)) == frame
    assert parse_hint(8, encode_hint(9, frame)) is None


@QUICK
@given(st.lists(FRAMES, max_size=6), st.data())
def test_any_split_of_the_stream_gives_the_same_frames(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, got = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert got == frames


@QUICK
@given(FRAMES, st.data())
def test_truncated_frame_is_not_yet_a_frame_and_no_hint(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame)
    cut = data.draw(st.integers(0, len(whole) - 1))
    reader = FrameReader()
    assert list(reader.feed(whole[:cut])) == []
    assert list(reader.feed(whole[cut:])) == [frame]
    assert parse_hint(9, encode_hint(9, frame)[: 4 + cut]) is None
    assert parse_hint(9, encode_hint(9, frame) + b"x") is None


@settings(QUICK, max_examples=300)
@given(st.one_of(st.binary(max_size=64), st.builds(lambda f, b: encode(f) + b, FRAMES, st.binary(max_size=40))))
def test_garbage_is_the_peers_error_and_nothing_else(garbage: bytes) -> None:
    assert parse_hint(0x30303030, garbage) is None or isinstance(parse_hint(0x30303030, garbage), Frame)
    try:
        list(FrameReader().feed(garbage))
    except PeerProtocolError:
        return


@settings(QUICK, max_examples=150)
@given(FRAMES, st.data())
def test_changed_bytes_give_a_frame_or_the_peers_error(frame: Frame, data: st.DataObject) -> None:
    damaged = bytearray(encode(frame))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(U8S)
    try:
        for got in FrameReader().feed(bytes(damaged)):
            assert isinstance(got, Frame)
    except PeerProtocolError:
        return


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("00000004 02 04 00000000", "version 2; this program speaks version 1"),
        ("00000000 01 00", "unknown type 0"),
        ("00000000 01 0e", "unknown type 14"),
        ("00000003 01 04 000000", "Ready frame with a body of 3 bytes"),
        ("00000005 01 04 0000000000", "Ready frame with a body of 5 bytes"),
        ("00000010 01 08" + "00" * 16, None),
        ("0000000f 01 08" + "00" * 15, "Stop frame with a body of 15 bytes"),
        ("ffffffff 01 0c 00000007", "State frame with a body of 4294967295 bytes"),
        ("48545450 2f 31", "version 47"),
    ],
)
def test_bad_prefix_is_refused_before_the_body_has_come(text: str, words: str | None) -> None:
    data = bytes.fromhex(text)
    if words is None:
        assert len(list(FrameReader().feed(data))) == 1
        return
    with pytest.raises(PeerProtocolError, match=words):
        list(FrameReader().feed(data[: wire.PREFIX_BYTES]))


def test_short_prefix_is_the_peers_error() -> None:
    with pytest.raises(PeerProtocolError):
        wire.parse_prefix(b"\0\0\0")


@pytest.mark.parametrize("frame", [Ready(-1), Ready(U32 + 1), Probe(U32 + 1, 0, 0, 0), Start(0, 0.0, 256)])
def test_value_that_does_not_fit_is_this_sides_error(frame: Frame) -> None:
    with pytest.raises(LocalProtocolError, match=type(frame).__name__):
        encode(frame)


def test_norm_may_be_anything_that_a_float_can_be() -> None:
    (frame,) = FrameReader().feed(encode(Start(0, math.nan, 0)))
    assert isinstance(frame, Start)
    assert math.isnan(frame.norm)
    assert list(FrameReader().feed(encode(Start(0, math.inf, 0)))) == [Start(0, math.inf, 0)]


@QUICK
@given(U32S, U32S, U32S)
def test_stream_header_survives_the_round_trip(session: int, round_: int, length: int) -> None:
    data = wire.encode_stream_header(session, round_, length)
    assert (len(data), wire.parse_stream_header(data)) == (12, (session, round_, length))
    with pytest.raises(PeerProtocolError):
        wire.parse_stream_header(data[:-1])
