"""Fates of transmissions: reading captures, joining both ends, comparing runs; and the command that prints it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from netem.analysis import fates as f
from netem.analysis.folder import FolderError, read_deliveries
from netem.analysis.pcapng import CaptureError, read_frames
from netem.cli import main
from netem.kernel.capture_worker import file_head, file_tail
from netem.links import mask
from netem.spec import load_scenario_text, resolved_yaml

UP, DOWN = 29600, 29700
SCENARIO = """\
name: tiny
seed: 7
topology: {star: {workers: 2}}
workload: {kind: replay, chunks: 50, iterations: 3}
profile: PROFILE
transports: {dblp: {low: 1%, high: 40%, detector: never}, mlt: {fixed: 1%}}
bursts: [{iteration: 1, loss: 60%}]
"""

Chunk = tuple[int, int, int, int]
"""UDP destination port, round, sequence, pass."""


def frame(chunk: Chunk, *, payload: int = 8, proto: int = 17, fragment: int = 0, session: int = 0xABCD) -> bytes:
    port, round_, sequence, pass_ = chunk
    chunk_header = struct.pack("!IIIHH", session, round_, sequence, pass_, payload)
    udp = struct.pack("!HHHH", 5, port, 8 + 16 + payload, 0)
    ip = struct.pack("!BBHHHBBHII", 0x45, 0, 20 + 24 + payload, 0, fragment, 64, proto, 0, 1, 2)
    return bytes(12) + b"\x08\x00" + ip + udp + chunk_header + bytes(payload)


def block(data: bytes, order: str = "=") -> bytes:
    padded = data + bytes(-len(data) % 4)
    length = 32 + len(padded)
    head = struct.pack(f"{order}IIIIIII", 6, length, 0, 0, 0, len(data), len(data))
    return head + padded + struct.pack(f"{order}I", length)


def write(path: Path, chunks: list[Chunk], missed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = b"".join(block(frame(chunk)) for chunk in chunks)
    path.write_bytes(file_head("sw", 96, "") + frames + file_tail(len(chunks), missed))
    return path


def keys(*pairs: tuple[int, int]) -> list[int]:
    return [sequence << 16 | pass_ for sequence, pass_ in pairs]


def test_chunks_are_read_by_direction_rank_and_round(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pcapng", [(UP + 1, 4, 9, 1), (UP + 1, 4, 2, 0), (UP + 2, 5, 1, 0), (DOWN + 1, 4, 3, 0)])
    tap = f.read_tap(path)
    assert {flow: list(found) for flow, found in tap.flows.items()} == {
        ("up", 1, 4): keys((2, 0), (9, 1)),
        ("up", 2, 5): keys((1, 0)),
        ("down", 1, 4): keys((3, 0)),
    }


def test_everything_but_chunks_is_left_out(tmp_path: Path) -> None:
    chunk = (UP + 1, 4, 9, 1)
    others = [
        frame((29500, 1, 1, 1)),  # another port
        frame((29800, 1, 1, 1)),  # hints
        frame(chunk, proto=6),
        frame(chunk, fragment=0x2000),
        frame(chunk, fragment=0x00FF),
        frame(chunk)[:40],  # cut
        frame(chunk).replace(b"\x08\x00\x45", b"\x86\xdd\x45"),
        frame(chunk)[:38] + b"\x00\x10" + frame(chunk)[40:],  # the lengths disagree
    ]
    path = tmp_path / "a.pcapng"
    path.write_bytes(file_head("sw", 96, "") + b"".join(map(block, others)) + block(frame(chunk)))
    assert {flow: len(found) for flow, found in f.read_tap(path).flows.items()} == {("up", 1, 4): 1}


def test_a_file_of_scapy_is_read_too(tmp_path: Path) -> None:
    from scapy.layers.inet import IP, UDP
    from scapy.layers.l2 import Ether
    from scapy.utils import PcapNgWriter

    payload = struct.pack("!IIIHH", 1, 7, 8, 9, 4) + bytes(4)
    packet = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02") / IP() / UDP(dport=UP + 3) / payload
    with PcapNgWriter(str(tmp_path / "a.pcapng")) as writer:
        writer.write(bytes(packet))
    assert list(f.read_tap(tmp_path / "a.pcapng").flows[f.Flow("up", 3, 7)]) == keys((8, 9))


def test_big_endian_files_are_read(tmp_path: Path) -> None:
    section = struct.pack(">IIIHHqI", 0x0A0D0D0A, 28, 0x1A2B3C4D, 1, 0, -1, 28)
    interface = struct.pack(">IIHHII", 1, 20, 1, 0, 0, 20)
    path = tmp_path / "a.pcapng"
    path.write_bytes(section + interface + block(frame((UP + 1, 1, 2, 3)), ">"))
    assert list(f.read_tap(path).flows[f.Flow("up", 1, 1)]) == keys((2, 3))


def test_counts_and_a_file_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pcapng", [(UP + 1, 1, n, 0) for n in range(5)], missed=3)
    whole = path.read_bytes()
    found = read_frames(path, 42)
    assert (found.packets, len(found.data), found.missed, found.truncated) == (5, 5, 3, False)
    path.write_bytes(whole[: -len(file_tail(0, 0)) - 10])
    found = read_frames(path, 42)
    assert (found.packets, found.missed, found.truncated) == (4, 0, True)


@pytest.mark.parametrize("content", [b"", b"\xd4\xc3\xb2\xa1" + bytes(40), file_head("x", 0, "") + bytes(40)])
def test_other_files_are_an_error_that_names_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.pcapng"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=r"a\.pcapng"):
        read_frames(path, 42)


def tap(*chunks: tuple[str, int, int, int, int]) -> f.Tap:
    flows: dict[f.Flow, list[int]] = {}
    for direction, rank, round_, sequence, pass_ in chunks:
        flows.setdefault(f.Flow(direction, rank, round_), []).append(sequence << 16 | pass_)
    return f.Tap({flow: np.unique(np.array(found, np.uint64)) for flow, found in flows.items()})


def test_the_fate_of_each_transmission() -> None:
    sent = [tap(("up", 1, 0, 1, 0), ("up", 1, 0, 2, 0)), tap(("up", 2, 0, 1, 0))]
    found = f.fates(sent, [tap(("up", 1, 0, 2, 0), ("up", 1, 0, 3, 0))], [("up", 1)])
    fate = found.flows[f.Flow("up", 1, 0)]
    assert list(fate.keys) == keys((1, 0), (2, 0), (3, 0))  # what arrived was sent
    assert list(fate.arrived) == [False, True, True]
    assert list(found.flows) == [("up", 1, 0)]  # of worker 2 only one end is known
    assert (found.transmissions, found.dropped) == (3, 1)


def test_a_lost_packet_that_the_other_run_delivered_is_found() -> None:
    sent = tap(*(("up", 1, 0, n, 0) for n in range(4)))
    one = f.fates([sent], [tap(("up", 1, 0, 0, 0), ("up", 1, 0, 1, 0))], [("up", 1)])
    other = f.fates([sent], [tap(("up", 1, 0, 0, 0), ("up", 1, 0, 2, 0))], [("up", 1)])
    found = f.compare(one, other)
    assert (found.compared, found.different, found.dropped, found.only) == (4, 2, 2, (0, 0))
    assert found.examples == (
        f.Example(f.Flow("up", 1, 0), 1, 0, (True, False)),
        f.Example(f.Flow("up", 1, 0), 2, 0, (False, True)),
    )
    assert f.compare(one, one).different == 0


def test_only_what_both_sent_is_compared() -> None:
    one = f.fates([tap(("up", 1, 0, 1, 0), ("up", 1, 1, 1, 0))], [], [("up", 1)])
    other = f.fates([tap(("up", 1, 0, 1, 0), ("up", 1, 0, 1, 1))], [], [("up", 1)])
    found = f.compare(one, other)
    assert (found.compared, found.different, found.only) == (1, 0, (1, 1))


def test_captures_of_a_run_are_found_by_name(tmp_path: Path) -> None:
    chunk = (UP + 1, 0, 1, 0)
    for name in ("dblp-r0-worker-1-ingress", "dblp-r0-server-egress", "dblp-r1-server-egress", "x-r0-server-egress"):
        write(tmp_path / f"{name}.pcapng", [chunk])
    found = list(f.captured(tmp_path, ["dblp", "mlt"], {"server": 0, "worker-1": 1}))
    assert [(name, repeat, fates.transmissions) for name, repeat, fates in found] == [("dblp", 0, 1), ("dblp", 1, 0)]


# --- the command


def run_folder(
    path: Path, *, profile: str = "paper", seed: int = 7, spoil: int = 0, digest: str = "d", both: bool = True
) -> Path:
    """A run whose links lost what the mask says, but for `spoil` packets; the transports sent not the same."""
    path.mkdir()
    spec = load_scenario_text(SCENARIO.replace("PROFILE", profile)).spec
    (path / "scenario.resolved.yaml").write_text(resolved_yaml(spec.model_copy(update={"seed": seed})))
    events = []
    for transport, passes in (("dblp", 1), ("mlt", 2)):
        arrived: list[Chunk] = []
        for rank in (1, 2):
            sent = [(UP + rank, 1, s, p) for s in range(50) for p in range(passes)]
            state, limit = mask.port_state(seed, "up", rank), mask.threshold(0.6)
            arrived += [c for c in sent if not mask.drops_scalar(state, (c[1], c[2], c[3] << 16), limit)]
            if both:
                write(path / "captures" / f"{transport}-r0-worker{rank}-ingress.pcapng", sent)
            event = {"event": "received", "transport": transport, "repeat": 0, "round": 1, "worker": rank}
            events.append(json.dumps(event | {"direction": "up", "delivered_digest": digest}))
        write(path / "captures" / f"{transport}-r0-server-egress.pcapng", arrived[spoil:])
    (path / "events.jsonl").write_text("".join(f"{line}\n" for line in events) + '{"event": "rec')
    return path


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    assert main(["compare", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {line["what"]: line for line in found["comparisons"]}
    assert by_name["scenario"]["equal"]
    assert by_name["fates, dblp"]["compared"] == 100
    assert by_name["fates, mlt"]["compared"] == 200
    assert by_name["fates, dblp and mlt in A"]["compared"] == 100
    assert by_name["fates, dblp and mlt in A"]["only"] == [0, 100]
    assert 40 < by_name["fates, dblp"]["dropped"] < 80
    assert by_name["delivered sets"]["compared"] == 4
    assert main(["compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert text.endswith("equal\n")
    assert max(map(len, text.splitlines())) <= 80


def test_one_run_compares_its_transports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(run_folder(tmp_path / "a"))]) == 0
    assert "dblp and mlt" in capsys.readouterr().out


def test_a_packet_with_two_fates_makes_runs_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", spoil=1)
    assert main(["compare", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert "arrived and dropped" in text
    assert text.endswith("different\n")


def test_another_seed_is_another_scenario(tmp_path: Path) -> None:
    assert main(["compare", str(run_folder(tmp_path / "a")), str(run_folder(tmp_path / "b", seed=8))]) == 1


def test_what_a_machine_needs_makes_no_other_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `dblp-netem vm` sets it."""
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    resolved = b / "scenario.resolved.yaml"
    resolved.write_text(resolved.read_text().replace("latencies: judged", "latencies: reported"))
    assert main(["compare", str(a), str(b)]) == 0
    assert "the same but for `latencies`, seed 7" in capsys.readouterr().out


@pytest.mark.parametrize(("profile", "status"), [("paper", 1), ("recommended", 0)])
def test_delivered_sets_count_under_stop_and_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: str, status: int
) -> None:
    a = run_folder(tmp_path / "a", profile=profile)
    b = run_folder(tmp_path / "b", profile=profile, digest="e")
    assert main(["compare", str(a), str(b)]) == status
    assert "4 rounds in both, 4 differ" in capsys.readouterr().out


def test_without_both_captures_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_folder(tmp_path / "a", both=False), run_folder(tmp_path / "b", both=False)
    assert main(["compare", str(a), str(b)]) == 0  # the delivered sets are equal
    assert "capture.both=true" in capsys.readouterr().out
    assert main(["compare", str(a)]) == 1
    assert "nothing to compare" in capsys.readouterr().err


def test_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 1
    assert "scenario.resolved.yaml" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "none")]) == 2


def test_a_damaged_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "received", "delivered_digest": "x"}\n')
    with pytest.raises(FolderError, match=r"events\.jsonl:1"):
        read_deliveries(path)
