"""The table of what drawing ahead is worth, by hand."""

from __future__ import annotations

from generation_speed import Seconds, overlap_table


def test_the_table_counts_neither_first_nor_last_rollouts_and_compares_medians() -> None:
    def run(whole: list[float], waited: list[float]) -> Seconds:
        seconds = Seconds()
        seconds.whole, seconds.waited = [99.0, 99.0, *whole, 99.0], [99.0, 99.0, *waited, 99.0]
        return seconds

    runs = {0: [run([3.0, 4.0], [2.0, 2.0]), run([5.0], [2.5])], 1: [run([2.0, 2.5], [0.25, 0.5]), run([1.5], [0.5])]}
    lines = overlap_table(runs, alone=(1.25, 0.045), load=(0.5, 1.5)).splitlines()
    assert lines[2] == "| 0 | 15.0 | 12 to 20 | 1.00 | 4.00 | 2.00 |"
    assert lines[3] == "| 1 | 30.0 | 24 to 40 | 2.00 | 2.00 | 0.50 |"
    assert "2 alternating rounds, 3 rollouts of each" in lines[5] and "1.25 s" in lines[5] and "45 ms" in lines[5]
