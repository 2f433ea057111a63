"""The words of `freeze` and `unfreeze_at`, and the rules around initial weights."""

from __future__ import annotations

import pytest

from runner.config.freezing import Entry, entries, moment


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, (None, None)), (100, (100, None)), ("100", (100, None)), ("2ep", (None, 2)), (1, (1, None))],
)
def test_a_moment_is_a_number_of_steps_or_of_epochs(text, expected):
    assert moment(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "2 ep", "0ep", "1.5", "2epochs", 0])
def test_anything_else_is_no_moment(text):
    with pytest.raises(ValueError, match="is not a number of optimizer steps"):
        moment(text)


def test_a_moment_of_its_own_comes_before_that_of_all():
    found = entries(["stem", "stages.0@3ep", "layer?@20"], "10")
    assert found == [Entry("stem", 10, None), Entry("stages.0", None, 3), Entry("layer?", 20, None)]
    assert entries("all-but-head", None) == [Entry("all-but-head", None, None)]
    assert entries(None, 5) == []


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (("unfreeze_at=100",), "unfreeze_at", "has no effect, as freeze names nothing"),
        (
            ("freeze=[stem]", "unfreeze_at=soon"),
            "unfreeze_at",
            "is not valid: 'soon' is not a number of optimizer steps",
        ),
        (("freeze=[stem@2h]",), "freeze", "is not valid: '2h' is not a number of optimizer steps"),
        (("freeze=['@3']",), "freeze", "is not valid: '@3' is not a pattern"),
        (("freeze=['stem@']",), "freeze", "is not valid: 'stem@' is not a pattern"),
        (("init=[normal,kaiming]",), "init", "draws the weights 2 times: normal, kaiming"),
        (
            ("model=torchvision", "model.weights=DEFAULT", "init=kaiming"),
            "init",
            "has kaiming, which would overwrite the weights that model.weights loads",
        ),
        (("init_mismatch=skip",), "init_mismatch", "has no effect without init_from"),
        (("init=he",), "init", "cannot be he"),
        (("model.head=deep",), "model.head", "cannot be deep"),
        (("model.head=[0]",), "model.head", "cannot be"),
    ],
)
def test_what_cannot_be_had_is_a_sentence(words, key, message, problems):
    found = problems(*words)
    assert list(found) == [key]
    assert message in found[key].message
    assert found[key].allowed


@pytest.mark.parametrize(
    "words",
    [
        ("freeze=all-but-head", "unfreeze_at=2ep"),
        ("freeze=[stem@2ep,stages.?.*,'*.bn[12]']", "unfreeze_at=100"),
        ("init=[kaiming,zero_gamma,prior_bias]",),
        ("model=torchvision", "model.weights=DEFAULT", "init=prior_bias"),
        ("model.head=[512,256]",),
        ("model.head=none",),
        ("model.head=[]",),
    ],
)
def test_what_can_be_had_is_no_problem(words, problems):
    assert problems(*words) == {}
