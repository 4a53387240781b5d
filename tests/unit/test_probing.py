"""The judges of doctor --fidelity on samples made up, and the rows of its table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netem.cli import main
from netem.kernel import distributions
from netem.links import chain, mask, predict
from netem.links.base import LossRule
from netem.links.chain import GilbertElliott
from netem.preflight import Check
from netem.probing import judges, lines, measure, settings
from netem.probing.judges import Context, Judge, Measure
from netem.probing.measure import Row, Table
from netem.probing.probe import CE, ECT_0, Samples, Sending
from netem.probing.settings import Put

PACKETS = 100_000
CONTEXT = Context(false_alarm=2e-5, base_s=0.0001)


def samples(
    lost: Any = None,
    *,
    ways_s: Any = 0.0001,
    sequence: Any = None,
    sent: int = PACKETS,
    gap_s: float = 1e-5,
    **more: Any,
) -> Samples:
    """Packets sent `gap_s` apart, of which those arrive that `lost` (sent,) does not name."""
    if sequence is None:
        sequence = np.arange(sent) if lost is None else np.flatnonzero(~lost)
    sent_ns = np.round(np.asarray(sequence) * gap_s * 1e9).astype(np.int64)
    arrived_ns = sent_ns + np.round(np.asarray(ways_s) * 1e9).astype(np.int64)
    tos = more.pop("tos", np.zeros(len(sequence), np.uint8))
    return Samples(sent, np.asarray(sequence, np.int64), sent_ns, arrived_ns, tos, **more)


def random() -> np.random.Generator:
    return np.random.default_rng(11)


def wrong(judge: Judge, found: Samples, context: Context = CONTEXT) -> list[str]:
    return [each.what for each in judge.measures(found, context) if not each.ok]


def lost_by(model: GilbertElliott, state: int = 5) -> Any:
    return chain.lost(state, PACKETS, chain.limits(model))


def test_loss_within_the_interval_and_beside_it() -> None:
    found = samples(random().random(PACKETS) < 0.4)
    assert wrong(judges.Loss(0.4), found) == []
    for asked in (0.39, 0.41, 0.5):
        assert wrong(judges.Loss(asked), found) == ["loss"]


@pytest.mark.parametrize("asked", [0.0, 1.0])
def test_a_single_packet_refutes_all_or_nothing(asked: float) -> None:
    lost = np.full(PACKETS, asked == 1.0)
    assert wrong(judges.Loss(asked), samples(lost)) == []
    lost[77] = not lost[77]
    assert wrong(judges.Loss(asked), samples(lost)) == ["loss"]


def test_losses_in_bursts_scatter_more() -> None:
    lost = np.zeros(PACKETS, np.bool_)
    lost[: round(0.207 * PACKETS)] = True
    assert wrong(judges.Loss(0.2), samples(random().permutation(lost))) == ["loss"]
    assert wrong(judges.Loss(0.2, clustering=5.0), samples(lost)) == []


def test_bursts_of_a_chain() -> None:
    asked = GilbertElliott.of_bursts(0.2, 3.0)
    judge = judges.Bursts(asked.p, asked.r)
    assert wrong(judge, samples(lost_by(asked))) == []
    assert wrong(judge, samples(lost_by(GilbertElliott.of_bursts(0.2, 2.5)))) == ["mean burst", "mean gap"]
    assert "mean burst" in wrong(judge, samples(random().random(PACKETS) < 0.2)), "the same loss, but each by itself"
    assert wrong(judge, samples(np.zeros(PACKETS, np.bool_))) == ["mean burst", "mean gap"]


def test_the_mean_burst_is_within_five_percent_however_few_packets_there_are() -> None:
    few = lost_by(GilbertElliott.of_bursts(0.2, 3.0))[:3000]
    (burst, _) = judges.Bursts(0.0833, 1 / 3.5).measures(samples(few, sent=3000), CONTEXT)
    assert burst.high <= burst.achieved + 0.05 * 3.5
    assert not burst.ok


def test_every_packet_as_predicted() -> None:
    rule = LossRule("10.0.0.1", 9, 0.3, duplicate_ratio=0.2, corrupt_ratio=0.1)
    fates = predict.by_rule(rule, 40, 500)
    arrivals = np.repeat(np.arange(500), fates.copies)
    assert wrong(judges.Predicted(fates), samples(sequence=arrivals, sent=500)) == []
    (measured,) = judges.Predicted(fates).measures(samples(sequence=arrivals[1:], sent=500), CONTEXT)
    assert (measured.achieved, measured.ok) == (1, False)


def test_predictions_are_those_of_the_reference() -> None:
    rule = LossRule("10.0.0.1", 9, 0.3, duplicate_ratio=0.2, corrupt_ratio=0.1)
    fates = predict.by_rule(rule, 40, 300)
    for number in range(300):
        hashed = mask.hash_scalar(9, (40, number, 0))
        assert fates.lost[number] == mask.drops_scalar(9, (40, number, 0), mask.threshold(0.3))
        assert fates.twice[number] == ((hashed & mask.U32) < mask.threshold(0.2))
        assert fates.damaged[number] == (mask.mix(hashed) >> 32 < mask.threshold(0.1))
    expected = [
        0 if lost else 1 - bad + two for lost, two, bad in zip(fates.lost, fates.twice, fates.damaged, strict=True)
    ]
    assert fates.copies.tolist() == expected
    model = GilbertElliott.of_bursts(0.3, 5)
    chained = predict.by_rule(replace(rule, chain=model), 40, 300).lost
    bounds, start = chain.limits(model), chain.key_base(9, (40, 0))
    assert chained.tolist() == [chain.lost_scalar(start, number, bounds) for number in range(300)]
    assert predict.by_port(model, 77, 300).lost.tolist() == [chain.lost_scalar(77, n, bounds) for n in range(300)]


def test_delay_on_top_of_the_path() -> None:
    noise = random().exponential(0.0001, 2000)
    found = samples(ways_s=0.0001 + 0.005 + noise, sent=2000)
    measured, _ = judges.Delay(0.005).measures(found, CONTEXT)
    assert measured.ok
    assert measured.achieved == pytest.approx(0.005 + float(np.median(noise)), abs=1e-6)
    assert measured.note.startswith("95 % below 5.")
    assert wrong(judges.Delay(0.0045), found) == ["median delay"]
    assert wrong(judges.Delay(0.0055), found) == ["median delay", "too early"]
    ways = np.full(2000, 0.0051)
    ways[7] = 0.0049
    assert wrong(judges.Delay(0.005), samples(ways_s=ways, sent=2000)) == ["too early"]


@pytest.fixture(scope="module")
def rows() -> dict[str, settings.Setting]:
    """The tables of distributions take a while."""
    return {row.name: row for row in settings.settings()}


@pytest.fixture(scope="module")
def jitters(rows: dict[str, settings.Setting]) -> dict[str, Judge]:
    """By distribution."""
    return {
        name: next(each for each in rows[f"jitter 2 ms {name}, delay 12 ms"].judges if isinstance(each, judges.Jitter))
        for name in ("uniform", *distributions.NAMES)
    }


def drawn(judge: Judge, packets: int = 5000) -> Any:
    """Delays as sch_netem draws them: any entry of a table is as likely as any other."""
    assert isinstance(judge, judges.Jitter)
    return random().choice(np.array(judge.delays_s), packets)


def test_the_even_jitter_fills_its_range(jitters: dict[str, Judge]) -> None:
    even = drawn(jitters["uniform"])
    assert 0.01 <= min(even) < 0.0101
    assert 0.0139 < max(even) <= 0.014


@pytest.mark.parametrize(
    ("name", "others"),
    [("uniform", ["normal", "pareto"]), ("normal", ["uniform", "pareto"]), ("pareto", ["uniform", "normal"]),
     ("paretonormal", ["uniform"])],
)  # fmt: skip
def test_jitter_is_told_by_its_distribution(name: str, others: list[str], jitters: dict[str, Judge]) -> None:
    found = samples(ways_s=0.0001 + drawn(jitters[name]), sent=5000)
    assert wrong(jitters[name], found) == []
    assert [other for other in others if "percentiles beside" not in wrong(jitters[other], found)] == []


def test_jitter_of_a_machine_whose_timers_are_late(jitters: dict[str, Judge]) -> None:
    late = random().exponential(0.001, 5000)
    found = samples(ways_s=0.0001 + drawn(jitters["normal"]) + np.random.default_rng(12).permutation(late), sent=5000)
    assert "percentiles beside" in wrong(jitters["normal"], found)
    assert wrong(jitters["normal"], found, replace(CONTEXT, late_s=tuple(late))) == []


def test_rate_is_told_behind_the_last_packet_sent_and_by_those_that_were_not_held_up() -> None:
    frame, sent = 1514, 2000
    pace = frame * 8 / 1e7
    arrive = 0.02 + pace * np.arange(sent)
    arrive[1200:1300] = arrive[1300]  # the machine stood still, and all came at once
    sequence = np.arange(sent)
    found = samples(ways_s=arrive - 1e-5 * sequence, sequence=sequence, sent=sent)
    assert wrong(judges.Speed(1e7, frame), found) == []
    assert wrong(judges.Speed(0.96e7, frame), found) == ["rate"]
    assert wrong(judges.Speed(1e7, frame), samples(sent=200)) == ["rate"], "1.2 Gbit/s"
    (untold,) = judges.Speed(1e9, frame).measures(samples(sent=200, gap_s=2e-5), CONTEXT)
    assert np.isnan(untold.achieved), "the sender was no faster"
    assert measure.verdict([untold], 0.0) == "disturbed"


def test_duplicates_marks_and_order() -> None:
    twice = random().random(PACKETS) < 0.1
    found = samples(sequence=np.repeat(np.arange(PACKETS), 1 + twice))
    assert wrong(judges.Twice(0.1), found) == []
    assert wrong(judges.Twice(0.12), found) == ["arrived twice"]
    assert wrong(judges.Ordered(), found) == []
    marked = samples(tos=np.where(random().random(PACKETS) < 0.1, CE, ECT_0).astype(np.uint8))
    assert wrong(judges.Marked(0.1), marked) == []
    assert wrong(judges.Marked(0.15), marked) == ["marked"]
    assert wrong(judges.Ordered(), samples(sequence=[0, 2, 1, 3], sent=4)) == ["out of order"]
    assert wrong(judges.Twice(0.0), samples(sequence=[0, 0, 0], sent=1)) == ["more often"]


def test_reordering_counts_the_packets_that_may_overtake() -> None:
    generator, early, counter = random(), np.zeros(20_000, np.bool_), 0
    for number in range(len(early)):
        early[number] = counter >= 4 and generator.random() < 0.25
        counter = 0 if early[number] else counter + 1
    ways = np.where(early, 0.0001, 0.0101)
    found = samples(ways_s=ways, sent=len(early), gap_s=5e-5)
    assert wrong(judges.Reordered(0.25, 5, 0.01), found) == []
    assert wrong(judges.Reordered(0.3, 5, 0.01), found) == ["not delayed"]
    assert wrong(judges.Reordered(0.25, 4, 0.01), found) == ["not delayed"]


def test_slots() -> None:
    sent = np.arange(1000) * 1e-4
    slots = np.ceil(sent / 0.005) * 0.005
    found = samples(ways_s=slots - sent, sent=1000, gap_s=1e-4)
    assert wrong(judges.Slots(0.005), found) == []
    assert wrong(judges.Slots(0.006), found) == ["between slots"]


def test_a_limit_lets_the_first_ones_through() -> None:
    def lost(passed: Sequence[int]) -> Any:
        return ~np.isin(np.arange(300), passed)

    assert wrong(judges.Limit(100), samples(lost(range(100)), sent=300)) == []
    assert wrong(judges.Limit(100), samples(lost(range(101)), sent=300)) == ["got through"]
    assert wrong(judges.Limit(100), samples(lost(range(200, 300)), sent=300)) == ["of the first"]
    rated = judges.Limit(43, 1e7, 1514)
    assert wrong(rated, samples(lost(range(46)), sent=300, took_ns=1_000_000)) == []
    assert wrong(rated, samples(lost(range(47)), sent=300, took_ns=1_000_000)) == ["got through"]


def test_a_row_is_worth_nothing_where_the_machine_got_in_the_way() -> None:
    good, bad = Measure("loss", "ratio", 0.1, 0.1, 0.09, 0.11), Measure("rate", "bps", 1e6, 8e5, 7.7e5, 8.3e5)
    (stray,) = judges.Accounted().measures(samples(np.arange(PACKETS) < 5, dropped=4), CONTEXT)
    assert measure.verdict([good], 0.0) == "held"
    assert measure.verdict([good, bad], 0.0) == "failed"
    assert measure.verdict([good, stray], 0.0) == "disturbed"
    assert measure.verdict([good], 0.01) == "held"
    assert measure.verdict([good, bad], 0.01) == "disturbed"


def test_the_rows(rows: dict[str, settings.Setting]) -> None:
    assert len(rows) == len(settings.settings()), "each name once"
    assert len(rows) == 36, "as README.md, docs/fidelity.md and CHANGELOG.md say"
    assert max(map(len, rows)) <= lines.WIDTHS[0]
    counted = [
        row for row in rows.values() if any(isinstance(judge, judges.Loss) and judge.ratio for judge in row.judges)
    ]
    rated = ("corrupt", "rate")
    assert all(row.sending.packets == PACKETS for row in counted if not row.name.startswith(rated))
    for row in rows.values():
        for backend in ("bpf", "netem"):
            assert row.judges_on(backend)  # type: ignore[arg-type]
    predicted = [
        row for row in rows.values() if any(isinstance(judge, judges.Predicted) for judge in row.judges_on("bpf"))
    ]
    assert len(predicted) >= 12
    assert not any(isinstance(judge, judges.Predicted) for row in rows.values() for judge in row.judges_on("netem"))


def test_rows_by_name() -> None:
    assert [row.name for row in settings.chosen(["loss 40 %", "loss 1 %"], 500)] == ["loss 40 %", "loss 1 %"]
    with pytest.raises(ValueError, match=r"'loss 3 %'.*loss 40 %"):
        settings.chosen(["loss 3 %"])


def test_a_rule_over_a_random_loss_is_not_predicted() -> None:
    assert Put(ratio=0.5).predicted(10) is not None
    assert Put(replace(Put().shape, loss_ratio=0.1), ratio=0.5).predicted(10) is None
    assert Put(replace(Put().shape, loss_ratio=0.1)).predicted(10) is None


def test_probe_packets_hold_a_number_and_a_time() -> None:
    with pytest.raises(ValueError, match="52 bytes"):
        Sending(1, packet_bytes=51)
    assert Sending(10, batch=1).train == 1
    assert Sending(10, packet_bytes=1500).train == 44
    assert Sending(10, segment=False).train == 1


def table(*rows: Row) -> Table:
    return Table("bpf", "6.1", 1, rows, 2e-5, 3e-5, 1e-5, 4.0)


GOOD = Row("loss 10 %", "held", 1000, (Measure("loss", "ratio", 0.1, 0.101, 0.09, 0.11),))
BAD = Row(
    "delay 5 ms", "failed", 1000, (Measure("median delay", "s", 0.005, 0.007, 0.0067, 0.0073, "95 % below 8 ms"),)
)
ABSENT = Row("slot 5 ms", "elsewhere", backends=("netem",))


def test_lines_of_the_table() -> None:
    ((text, words),) = lines.lines(GOOD)
    assert text.split() == ["loss", "10", "%", "loss", "10", "%", "10.1", "%", "9", "..", "11"]
    assert words == "ok"
    ((text, words),) = lines.lines(BAD)
    assert text.split()[3:] == ["median", "delay", "5", "ms", "7", "ms", "6.7", "..", "7.3"]
    assert words == "FAILED  95 % below 8 ms"
    assert next(lines.lines(ABSENT))[1] == "only with netem"
    nought = Measure("out of order", "packets", 0, 0, 0, 0)
    assert len(list(lines.lines(replace(GOOD, measures=(*GOOD.measures, nought))))) == 1
    moved = replace(nought, achieved=3, low=3, high=3)
    (_, (text, words)) = lines.lines(replace(GOOD, verdict="failed", measures=(*GOOD.measures, moved)))
    assert (text.split(), words) == (["out", "of", "order", "0", "3", "exact"], "beside")
    said = "\n".join(lines.summary(table(GOOD, BAD, ABSENT), 1e-4, 2e-4))
    assert "1 of 2 settings as asked, 1 not to be had here" in said
    assert "not as asked: delay 5 ms" in said


def test_json_has_no_number_that_is_none() -> None:
    untold = Measure("rate", "bps", 1e6, float("nan"), float("nan"), float("inf"))
    found = table(replace(BAD, measures=(untold,))).to_json()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["rows"][0]["measures"][0] | {"note": ""} == {
        "what": "rate", "unit": "bps", "requested": 1e6, "achieved": None, "low": None, "high": None, "note": "",
        "ok": False,
    }  # fmt: skip
    assert not again["ok"]


@pytest.mark.parametrize(
    ("rows", "status"), [((GOOD, ABSENT), 0), ((GOOD, BAD), 5), ((replace(GOOD, verdict="disturbed"),), 5)]
)
def test_exit_status(
    rows: tuple[Row, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def measured(backend: str, state_dir: Path, on_row: Any) -> Table:
        assert (backend, state_dir) == ("bpf", tmp_path)
        for row in rows:
            on_row(row)
        return table(*rows)

    monkeypatch.setattr("netem.preflight.require", lambda: None)
    monkeypatch.setattr(
        "netem.preflight.probe", lambda state_dir: {"bpf": Check(True, ""), "netem": Check(False, "none")}
    )
    monkeypatch.setattr("netem.experiment.calibrate.sleeping", lambda: [1e-4])
    monkeypatch.setattr("netem.probing.measure.measure", measured)
    argv = ["doctor", "--fidelity", "--state-dir", str(tmp_path)]
    assert main(argv) == status
    assert rows[0].setting in capsys.readouterr().out
    assert main([*argv, "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    assert found["rows"][0]["measures"][0]["ok"] is True
    assert main([*argv, "--backend", "netem"]) == 4, "asked for, and not here"
    assert main([*argv, "--backend", "tc"]) == 2
    assert main([*argv, "--calibrate"]) == 2
    assert main(["doctor", "--backend", "bpf"]) == 2
