"""Device profiles: what is shipped is whole and names its source; what is asked for is found."""

import pytest

from paceline.errors import SpecError
from paceline.spec.profile import (
    SHIPPED,
    DeviceProfile,
    Layer,
    find_profile,
    load_profile,
    save_profile,
    shipped_devices,
)

PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "googlenet": 6_624_904,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
}


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_profile_is_whole(path):
    profile = load_profile(path)
    assert path.stem == f"{profile.device}-{profile.model}-{profile.precision}"
    assert profile.source
    measured = profile.device in ("h200", "cpu")
    assert profile.kind == ("measured" if measured else "estimated")
    if profile.model in PARAMETERS:
        assert profile.parameter_bytes == 4 * PARAMETERS[profile.model]


@pytest.mark.parametrize(
    ("device", "model", "images_per_second"),
    [("k80", "resnet50", 51.9), ("p100", "vgg16", 154.0), ("p100", "resnet152", 91.8)],
)
def test_estimates_give_back_their_anchor(device, model, images_per_second):
    profile = find_profile(device, model)
    rate = profile.batch / profile.step_seconds(profile.batch)
    assert rate == pytest.approx(images_per_second, rel=1e-3)


def test_every_named_device_is_shipped():
    assert {"gtx980", "titanx", "k80", "p100", "v100", "h200", "cpu"} <= set(shipped_devices())


def test_overhead_does_not_shrink_with_the_batch():
    layer = Layer(name="a", forward_seconds=0.4, backward_seconds=0.6, parameter_bytes=4)
    profile = DeviceProfile(
        device="toy",
        model="m",
        batch=10,
        input_shape=(1,),
        kind="measured",
        source="a test",
        layers=(layer,),
        overhead_seconds=0.5,
    )
    assert [profile.step_seconds(b) for b in (5, 10, 20)] == pytest.approx([0.75, 1.0, 1.5])


def test_a_saved_profile_reads_back(tmp_path):
    profile = find_profile("h200", "alexnet", "bfloat16")
    save_profile(profile, tmp_path / "own.json")
    assert load_profile(tmp_path / "own.json") == profile
    assert find_profile(str(tmp_path / "own.json"), "alexnet") == profile


def test_what_is_not_there_is_an_error_with_a_fix(tmp_path):
    with pytest.raises(SpecError, match='did you mean "k80"'):
        find_profile("k8", "resnet50")
    with pytest.raises(SpecError, match="no float32 profile of gpt-small on k80"):
        find_profile("k80", "gpt-small")
    with pytest.raises(SpecError, match="no such profile file"):
        find_profile("nowhere.json", "resnet50")
    (tmp_path / "bad.json").write_text('{"device": 3}')
    with pytest.raises(SpecError, match="not a device profile"):
        load_profile(tmp_path / "bad.json")
    save_profile(find_profile("k80", "vgg16"), tmp_path / "own.json")
    with pytest.raises(SpecError, match="of vgg16, and the model is resnet50"):
        find_profile(str(tmp_path / "own.json"), "resnet50")
