"""What a person waiting reads: how much is done, how fast, how long it takes. Silence where nobody waits."""

import pytest

from harness import progress


def test_units_found_done_are_not_part_of_the_rate(monkeypatch, capsys):
    """Fault: a resumed sweep, whose first thousand jobs are skipped at once, promises the end in seconds."""
    clock = iter([0.0, 60.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.meter(1280, "jobs", True) as at:
        at(900, old=870, note="1 failed")
    assert capsys.readouterr().err == "900 of 1,280 jobs, 1 failed, 30/min, 12 min 40 s left\n"


def test_a_line_comes_now_and_then_and_at_the_end(monkeypatch, capsys):
    """Fault: a log with a line per job, or one that stops before the last."""
    clock = iter([0.0, 1.0, 2.0, 12.0, 12.5, 13.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.meter(5, "jobs", True) as at:
        for done in range(1, 6):
            at(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" jobs")[0] for line in lines] == ["3 of 5", "5 of 5"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (72, "1 min 12 s"), (3600, "1 h 0 min"), (11100, "3 h 5 min")]
)
def test_a_duration_is_read_at_a_glance(seconds, text):
    assert progress.duration(seconds) == text


def test_without_a_total_nothing_is_promised():
    """Fault: a sweeper that decides as it goes, told to be done."""
    assert progress.text(3, None, "jobs", 0.5) == "3 jobs, 30/min"
    assert progress.text(0, 7, "jobs", 0.0) == "0 of 7 jobs"
