"""A few changed files for each reader; `make attack` tries more."""

import pytest
from readers import CORPUS, READERS
from run import fuzz

INPUTS = 250


@pytest.mark.parametrize("name", READERS)
def test_any_file_gives_a_result_or_a_sentence(name):
    ends, failures = fuzz(name, 0, INPUTS)
    assert failures == []
    assert ends.total() == INPUTS
    assert len(ends) > 1  # some are read, some are refused


def test_every_file_of_the_corpus_belongs_to_a_reader():
    used = {file for reader in READERS.values() for file in reader.corpus}
    assert used | {"trace_rank1.json"} == {file.name for file in CORPUS.iterdir()}
