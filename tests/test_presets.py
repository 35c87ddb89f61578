"""The shipped presets, and files that are none."""

from __future__ import annotations

import pytest

from sdaccel.errors import SettingError
from sdaccel.presets import find_preset, presets, read_preset
from sdaccel.profile import Range

NATIVE = {"sd1": 512, "sd2": 768, "sdxl": 1024, "sdxl-refiner": 1024}
GOOD = 'name = "x"\ndescription = "y"\nfamily = "any"\n\n[[profile]]\nwidth = "512"\nheight = "512-768-1024"\n'


def test_the_shipped_ones():
    names = {preset.name for preset in presets()}
    assert names == {"demo", "hires", "sd15", "sd15-dynamic", "sd21", "sdxl", "sdxl-aspect-buckets", "sdxl-dynamic"}
    for preset in presets():
        assert preset.path.stem == preset.name
        assert preset.description
        for family in preset.families or NATIVE:
            assert preset.image_profiles(family, NATIVE[family])


def test_values():
    (profile,) = find_preset("sdxl").image_profiles("sdxl", 1024)
    assert (profile.width, profile.height, profile.batch) == (Range(1024, 1024, 1024),) * 2 + (Range(1, 1, 1),)
    buckets = find_preset("sdxl-aspect-buckets").image_profiles("sdxl", 1024)
    assert all(abs(p.width.opt * p.height.opt / 1024**2 - 1) < 0.07 for p in buckets)
    assert {(p.height.opt, p.width.opt) for p in buckets} == {(p.width.opt, p.height.opt) for p in buckets}
    sizes = {(p.width.opt, p.height.opt) for p in find_preset("hires").image_profiles("sd1", 512)}
    assert sizes == {(s * w, s * h) for w, h in ((512, 512), (512, 768), (768, 512), (768, 768)) for s in (1, 2)}


def test_a_preset_for_another_family_is_refused():
    with pytest.raises(SettingError, match=r"sdxl is for sdxl; the model is sd1.* demo, hires, sd15"):
        find_preset("sdxl").image_profiles("sd1", 512)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(SettingError, match=r"no preset 'sd3': demo, .*\.toml"):
        find_preset("sd3")


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "my preset é.toml"
    path.write_text("\ufeff" + GOOD, encoding="utf-8")
    (profile,) = find_preset(str(path)).image_profiles("sdxl", 1024)
    assert (profile.height, profile.batch, profile.tokens) == (
        Range(512, 768, 1024),
        Range(1, 1, 4),
        Range(77, 77, 231),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "steps = 4\n", r"line 8: profile 1, steps is not known here"),
        (GOOD.replace("family", "famly"), r"line 3: famly is not known here"),
        (GOOD.replace('"any"', '"sd3"'), r"line 3: family must be any, sd1"),
        (GOOD.replace('"any"', "[]"), r"line 3: family must be"),
        (GOOD.replace('"any"', "3"), r"line 3: family must be"),
        (GOOD.replace('"512"', "512"), r"line 6: profile 1, width must be text in quotes"),
        (GOOD.replace('"512"', '"512x768"'), r"line 6: profile 1, width must be one range"),
        (GOOD.replace('width = "512"\n', ""), r"profile 1, width is missing"),
        (GOOD.split("[[")[0], r"profile must be one or more"),
        (GOOD.split("[[")[0] + 'profile = "x"\n', r"profile must be one or more"),
        (GOOD.replace("name =", "name"), r"line 1"),
        (GOOD + GOOD[GOOD.index("[[") :] + 'batch = ""\n', r"line 11: profile 2, batch must be text"),
    ],
)
def test_faults_are_named_with_line_and_field(tmp_path, text, message):
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError, match=message):
        read_preset(path)


def test_numbers_that_cannot_be_built(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(GOOD.replace('"512"', '"513"'), encoding="utf-8")
    with pytest.raises(SettingError, match=r"profile 1: width 513 cannot be built.*Try 512"):
        read_preset(path).image_profiles("sd1", 512)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingError, match="cannot be read"):
        find_preset(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError):
        find_preset(str(tmp_path / "binary.toml"))
