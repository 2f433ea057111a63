"""The words of `freeze` and `unfreeze_at`."""

from __future__ import annotations

import pytest

from runner.config.rules import Entry, entries, moment


def test_a_moment_is_a_number_of_steps_or_of_epochs():
    assert [moment(text) for text in (None, 100, "1", "2ep")] == [(None, None), (100, None), (1, None), (None, 2)]


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "2 ep", "0ep", "1.5", "2epochs", 0])
def test_anything_else_is_no_moment(text):
    with pytest.raises(ValueError, match="is not a number of optimizer steps"):
        moment(text)


def test_a_moment_of_its_own_comes_before_that_of_all():
    found = entries(["stem", "stages.0@3ep", "layer?@20"], "10")
    assert found == [Entry("stem", 10, None), Entry("stages.0", None, 3), Entry("layer?", 20, None)]
    assert entries("all-but-head", None) == [Entry("all-but-head", None, None)]
    assert entries(None, 5) == []
