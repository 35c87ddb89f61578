"""What the tuner measured: kept, merged, exported, and never trusted blindly."""

import json
import multiprocessing

import pytest

from sdaccel.backends.cuda.timing_cache import FULL, Measured, Signature, TacticTable, TimingCache
from sdaccel.errors import SettingError

H200 = {"name": "NVIDIA H200", "capability": "9.0"}
L4 = {"name": "NVIDIA L4", "capability": "8.9"}


def signature(*sizes: int, op: str = "linear", fixed: str = "float16 w320x320") -> Signature:
    return Signature(op, fixed, sizes)


def measured(tactic: str = "torch", microseconds: float = 5.0) -> Measured:
    return Measured(
        tactic, microseconds, {tactic: microseconds, "other": 2 * microseconds}, {"wrong": "its error is 1"}
    )


def test_a_signature_survives_its_text():
    for sizes in ((), (1,), (2, 64, 64)):
        assert Signature.parse(str(signature(*sizes))) == signature(*sizes)


def test_an_unknown_shape_takes_the_tactic_of_the_nearest_known_one():
    table = TacticTable({signature(2, 64): measured("small"), signature(2, 4096): measured("large")})
    assert table.get(signature(2, 128)) is None
    assert table.nearest(signature(2, 128)).tactic == "small"
    assert table.nearest(signature(4, 2048)).tactic == "large"
    assert table.nearest(signature(2, 64, fixed="bfloat16 w320x320")) is None
    assert table.nearest(signature(2, 64, op="conv")) is None


def test_what_is_saved_is_read_again(tmp_path):
    path = tmp_path / "deep" / "timing.json"
    cache = TimingCache(path, H200)
    cache.put(signature(1), measured())
    cache.save()
    assert TimingCache(path, H200).measured == {signature(1): measured()}


def test_what_was_measured_while_memory_was_short_is_measured_again(tmp_path):
    path = tmp_path / "timing.json"
    cache = TimingCache(path, H200)
    cache.put(signature(1), measured())
    cache.put(signature(2), Measured("torch", 9.0, {"torch": 9.0}, {"ours": FULL}))
    cache.save()
    assert cache.get(signature(2)) is not None
    assert set(TimingCache(path, H200).measured) == {signature(1)}


def test_caches_of_two_builds_are_merged(tmp_path):
    path = tmp_path / "timing.json"
    first, second = TimingCache(path, H200), TimingCache(path, H200)
    first.put(signature(1), measured("a"))
    second.put(signature(2), measured("b"))
    first.save()
    second.save()
    assert set(TimingCache(path, H200).measured) == {signature(1), signature(2)}


def _add(path, number):
    cache = TimingCache(path, H200)
    cache.put(signature(number), measured())
    cache.save()


def test_processes_do_not_lose_each_other_s_measurements(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add, args=(tmp_path / "timing.json", number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(TimingCache(tmp_path / "timing.json", H200).measured) == 4


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 2}', b'{"format": 1, "device": {}}', b'{"format": 1, "device": 2}'],
)
def test_a_damaged_file_is_a_miss(tmp_path, content):
    path = tmp_path / "timing.json"
    path.write_bytes(content)
    cache = TimingCache(path, H200)
    assert not cache.measured
    cache.put(signature(1), measured())
    cache.save()
    assert TimingCache(path, H200).measured


def test_another_device_s_measurements_are_refused(tmp_path):
    cache = TimingCache(tmp_path / "timing.json", H200)
    cache.put(signature(1), measured())
    cache.export(tmp_path / "exported.json")
    assert TimingCache(tmp_path / "own.json", H200).take(tmp_path / "exported.json") == 1
    other = TimingCache(tmp_path / "l4.json", L4)
    with pytest.raises(SettingError, match=r"another device \(NVIDIA H200 9.0\)"):
        other.take(tmp_path / "exported.json")
    assert not other.measured


@pytest.mark.parametrize("document", [[], {"format": 1}, {"format": 1, "device": H200, "measured": {"x": {}}}])
def test_what_is_no_timing_cache_is_named(tmp_path, document):
    path = tmp_path / "notes.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(SettingError, match="is not a timing cache"):
        TimingCache(tmp_path / "own.json", H200).take(path)
