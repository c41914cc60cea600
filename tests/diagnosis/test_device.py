"""`jspec doctor --device`: what it says of devices, and of hosts where jax fell back to CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from jspec.cli.diagnosis.device import examine_device, problems_of
from jspec.cli.main import main
from jspec.errors import ConfigError
from jspec.spec.accelerators import accelerator_of


def test_it_reports_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["doctor", "--device", "--output", str(report)]) == 0
    said = capsys.readouterr().out.splitlines()
    count = len(jax.devices())
    assert said[0] == f"devices: {count} x cpu (cpu)"
    found = json.loads(report.read_text())
    assert found["problems"] == []
    assert f"jax {jax.__version__}" in found["facts"]["versions"]
    names = [each["what"] for each in found["measured"]]
    assert names[-2:] == [f"all-reduce of {mib} MiB over {count} devices" for mib in ("0.5", "2")]
    assert any(name.startswith("attention of 4 rows") for name in names)
    assert all(each["microseconds"] > 0 for each in found["measured"])
    # SGLang's flag of this name has a value.
    assert main(["doctor", "--device", "cuda", "--engine-process"]) == 2
    assert "--engine-process is set" in capsys.readouterr().err


TPU, GPU = "dev/accel0", "dev/nvidia0"


@pytest.mark.parametrize(
    ("of_jax", "files", "packages", "environ", "expected"),
    [
        ("cpu", {TPU: ""}, (), {}, "libtpu is not installed; expected pip install '.[tpu]'"),
        ("cpu", {TPU: ""}, ("libtpu",), {}, "another process has the chips"),
        ("cpu", {"sys/bus/pci/devices/0/vendor": "0x1ae0\n"}, (), {}, "this host has a TPU"),
        ("cpu", {GPU: ""}, (), {}, "expected pip install '.[cuda]'"),
        ("cpu", {GPU: ""}, ("jax-cuda13-plugin",), {}, "look at nvidia-smi"),
        ("cpu", {TPU: ""}, (), {"JAX_PLATFORMS": "cpu"}, None),
        ("cpu", {"sys/bus/pci/devices/0/vendor": "0x8086\n"}, ("libtpu",), {}, None),
        ("tpu", {TPU: ""}, ("libtpu",), {}, None),
    ],
)
def test_a_fall_to_cpus_is_a_problem(
    of_jax: str,
    files: dict[str, str],
    packages: tuple[str, ...],
    environ: dict[str, str],
    expected: str | None,
    tmp_path: Path,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = list(problems_of(of_jax, dict.fromkeys(packages, "1"), environ, tmp_path))
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_a_backend_that_does_not_start_is_one_line() -> None:
    def busy() -> list[jax.Device]:
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: in use\nby pid 7")

    with pytest.raises(
        ConfigError, match=r"jax starts no device: Unable .* in use; expected a free"
    ):
        examine_device(find=busy, say=print)


def test_devices_are_known_by_jax_s_names() -> None:
    kinds = {
        "TPU v5 lite": "v5e",
        "TPU v5": "v5p",
        "TPU v6 lite": "v6e",
        "TPU7x": "v7x",
        "NVIDIA H200": "H200",
        "NVIDIA H100 80GB HBM3": "H100",
    }
    found = {kind: accelerator_of(kind) for kind in kinds}
    assert {kind: own and own.name for kind, own in found.items()} == kinds
    assert accelerator_of("cpu") is None
