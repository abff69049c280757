import itertools

import pytest

from deployments.engines import matmul_race
from deployments.engines.matmul_race import choose, quickest_cpu_dtype


@pytest.mark.parametrize(
    ("narrow_s", "exact_s", "dtype", "reason"),
    [
        (1.0, 2.0, "bfloat16", "it has instructions, 2.0 times as fast in products as float32"),
        (1.0, 1.0, "bfloat16", "it has instructions, 1.0 times as fast in products as float32"),
        (1.8, 1.0, "float32", "it has instructions, but multiplies float32 1.8 times as fast"),
    ],
)
def test_the_narrow_format_is_taken_only_where_it_is_no_slower(narrow_s, exact_s, dtype, reason):
    times = {"bfloat16": narrow_s, "float32": exact_s}
    assert choose("bfloat16", "it has instructions", times.__getitem__) == (dtype, reason)


def test_a_moment_in_which_the_machine_is_busy_decides_nothing():
    busy = itertools.count()
    dtype, _ = choose("bfloat16", "", lambda dtype: 9.0 if next(busy) < 4 else {"bfloat16": 1.0, "float32": 2.0}[dtype])
    assert dtype == "bfloat16"


def test_without_instructions_there_is_no_race(monkeypatch):
    monkeypatch.setattr(matmul_race, "quick_cpu_dtype", lambda: ("float32", "none"))
    quickest_cpu_dtype.cache_clear()
    assert quickest_cpu_dtype() == ("float32", "none")
    quickest_cpu_dtype.cache_clear()
