"""hocket beside the oracles, on inputs drawn from seeds. `make attack` goes on with other seeds."""

import pytest
from against import CLAIMS

# A claim, and how many seeds of it are tried here: together about 40 s of processor time.
SEEDS = {"times": 350, "verdicts": 500, "registered": 80, "bounds": 150, "plans": 25}
PARTS = 5  # tests of each claim, so that several processes share them


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("claim", CLAIMS)
def test_hocket_agrees_with_the_oracles(claim, part, tmp_path):
    for seed in range(part, SEEDS[claim], PARTS):
        CLAIMS[claim](seed, tmp_path)
