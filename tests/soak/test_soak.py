"""A few seeds of the soak: killed ranks are named, nobody is left, memory stays flat."""

import pytest
from long_use import Hosts, killed, killed_under_torchrun, memory_is_flat

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("seed", [1])
def test_a_killed_rank_is_named_and_all_end(seed, tmp_path):
    assert killed(seed, tmp_path)


@pytest.mark.skipif(not Hosts.possible(), reason="no network namespaces here")
def test_a_killed_rank_on_another_host_is_named_and_all_end(tmp_path):
    assert killed_under_torchrun(1, tmp_path)


def test_many_steps_of_changing_shapes_take_no_more_memory(tmp_path):
    memory_is_flat(1, tmp_path, steps=90)
