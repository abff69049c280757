"""The service of `windve check --devices`: a Ray of its own, with a tiny model."""

from calibration.devices.service_load import measure
from calibration.devices.shapes import BertShape, write_bert


def test_a_service_below_and_above_its_capacity(tmp_path):
    write_bert(BertShape(64, 2, 4, 128), tmp_path / "model")
    found = measure(tmp_path / "model", "cpu", texts=2, clients=4, seconds=1.0)
    assert found["capacity_s"] > 0
    assert found["alone_p50_ms"] > 0
    assert [load["share"] for load in found["loads"]] == [0.8, 2.0]
    for load in found["loads"]:
        ended = sum(load[name] for name in ("in_time_s", "late_s", "refused_s", "failed_s"))
        assert load["in_time_s"] > 0
        assert abs(ended - load["offered_s"]) < 1e-6
