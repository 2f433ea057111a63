import math

from runner.tracking import formats
from runner.tracking.formats import clean, compact, duration, in_order, metric, number


def test_large_numbers_get_three_digits_and_a_suffix():
    numbers = (1, 12_345, 999.6, 1_234_567, 99_950, -2500, 0)
    assert [compact(value) for value in numbers] == ["1", "12.3k", "1.00k", "1.23M", "100k", "-2.50k", "0"]


def test_numbers_have_four_digits_and_missing_ones_are_nan():
    assert [number(x) for x in (0.123456, 3, 1e-7, None, math.nan)] == ["0.1235", "3", "1e-07", "nan", "nan"]


def test_a_deviation_has_two_digits_or_all_before_the_point():
    pairs = ((0.98, 0.0039), (3421.0, 293.4), (0.5, None), (1e9, 2.5e8))
    expected = ["0.98 ± 0.0039", "3421 ± 293", "0.5", "1e+09 ± 2.5e+08"]
    assert [formats.plus_minus(*pair) for pair in pairs] == expected


def test_durations_read_like_a_clock():
    times = (0.4, 12, 3723, 2 * 86400 + 5, None, math.inf)
    assert [duration(seconds) for seconds in times] == ["0:00", "0:12", "1:02:03", "2d 0:00:05", "?", "?"]


def test_metrics_are_shown_with_their_unit_and_in_reading_order():
    assert metric("samples_per_s", 12_345.0) == "12.3k samples/s"
    assert metric("loss", None) == "loss nan"
    assert in_order(["samples_per_s", "lr", "accuracy", "loss"]) == ["loss", "accuracy", "lr", "samples_per_s"]
    names = ["lr", "samples_per_s", "step_ms", "grad_norm"]
    assert [formats.label(name) for name in names] == ["learning rate", "samples/s", "step (ms)", "grad norm"]


def test_gauges_of_the_machine_are_short_and_come_last():
    assert metric("data_wait", 0.0312) == "data wait 3.1%"
    assert metric("mfu", 0.4) == "mfu 40%"
    assert metric("peak_memory_mib", 12_345.6) == "memory 12,346 MiB"
    assert in_order(["mfu", "samples_per_s", "loss", "data_wait"]) == ["loss", "samples_per_s", "mfu", "data_wait"]


def test_colour_codes_and_control_characters_are_removed():
    assert clean("\x9b31mred\x85") == "31mred"
    assert clean("\x1b[1;31mred\x1b[0m\tx\r\x07\n\x1b]0;title\x07y") == "red    x\ny"


def test_a_table_is_aligned_with_numbers_to_the_right():
    rows = formats.aligned(["name", "n"], [["a", "1"], ["bcdef", "100"]])
    assert rows == ["name     n", "-----  ---", "a        1", "bcdef  100"]
    assert formats.aligned(["name"], []) == ["name", "----"]
