"""A TPU slice's hosts are found without flags; jax's own detection runs, with GKE's variables."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster

from jspec.config.engine_args import EngineArgs
from jspec.config.hosts import HostPlace
from jspec.engine.hosts.slices import PORT, place_of
from jspec.errors import ConfigError


@pytest.fixture
def gke(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", None)
    for name, value in {
        "TPU_WORKER_HOSTNAMES": "localhost,worker-1",
        "TPU_WORKER_ID": "1",
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    yield monkeypatch
    jax.config.update("jax_platforms", platforms)


def test_a_slice_has_its_hosts_without_flags(gke: pytest.MonkeyPatch) -> None:
    found = place_of(EngineArgs(tp_size=4))
    assert found == HostPlace(count=2, rank=1, host="localhost", port=PORT, timeout=600.0)
    assert found.coordinator == f"localhost:{PORT + 1}"
    with pytest.raises(ConfigError, match="tp_size is 1 on 2 hosts"):
        place_of(EngineArgs())
    assert place_of(EngineArgs(nnodes=1)) is None
    gke.setenv("TPU_WORKER_ID", "none")
    with pytest.raises(ConfigError, match="the hosts of this TPU slice cannot be found"):
        place_of(EngineArgs(tp_size=4))
    gke.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    gke.setenv("TPU_WORKER_ID", "0")
    assert place_of(EngineArgs()) is None


def test_arguments_of_several_hosts_are_checked() -> None:
    for arguments, expected in (
        ({"nnodes": 2}, "nnodes is 2 without dist_init_addr"),
        ({"node_rank": 1}, "node_rank is 1, but nnodes is"),
        ({"nnodes": 2, "dist_init_addr": "here"}, "dist_init_addr is 'here'; expected HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": "a:65535"}, "with a port from 1 to 65534"),
        ({"nnodes": 2, "dist_init_addr": "a:1"}, "tp_size is 1 on 2 hosts"),
    ):
        with pytest.raises(ConfigError, match=expected):
            EngineArgs.from_mapping(arguments)
    ready = {"nnodes": 2, "dist_init_addr": "[::1]:5000", "tp_size": 2}
    found = place_of(EngineArgs.from_mapping(ready))
    assert found is not None
    assert (found.host, found.address, found.coordinator) == ("::1", "[::1]:5000", "[::1]:5001")
    with pytest.raises(ConfigError, match="speculative_adaptive is True on 2 hosts"):
        EngineArgs.from_mapping({**ready, "speculative_adaptive": True})
    with pytest.raises(ConfigError, match="expert_distribution_recorder_mode is 'stat' on 2 hosts"):
        EngineArgs.from_mapping({**ready, "expert_distribution_recorder_mode": "stat"})
