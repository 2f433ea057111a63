"""What is trained, and what is in evaluation mode, as a function of the position."""

from __future__ import annotations

from torch import nn

from runner.engine.freezing import Freezing, Frozen
from runner.engine.plan import Position


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.body = nn.Linear(2, 2)
        self.quiet = nn.Dropout().eval()


def part(model: nn.Module, name: str, **until: int) -> Frozen:
    inner = model.get_submodule(name)
    return Frozen(name, tuple(inner.parameters()), tuple(inner.modules()), **until)


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


STEM = {"stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"}
BODY = {"body.weight", "body.bias"}


def test_parts_are_let_go_after_their_step_or_epoch_and_follow_a_position_back():
    model = Net()
    freezing = Freezing(model, [part(model, "stem", steps=3), part(model, "body", epochs=2)])
    for position, expected in (
        (Position(), set()),
        (Position(global_step=2), set()),
        (Position(global_step=3, epoch=1), STEM),
        (Position(global_step=4, epoch=2), STEM | BODY),
        (Position(global_step=1, epoch=0), set()),
    ):
        freezing.train(position)
        assert trained(model) == expected
        assert model.stem[1].training == ("stem.1.weight" in expected)
        assert model.training


def test_following_tells_what_was_let_go_and_once():
    model = Net()
    freezing = Freezing(model, [part(model, "stem", steps=3), part(model, "body")])
    freezing.train(Position())
    said: list[str] = []
    freezing.report = said.append
    freezing.follow(Position(global_step=2))
    assert said == []
    freezing.follow(Position(global_step=3))
    assert model.stem[1].training
    freezing.follow(Position(global_step=4))
    assert said == ["step 3: stem is trained from now on, 10 parameters"]
    assert trained(model) == STEM


def test_of_several_parts_the_one_that_holds_longest_decides():
    model = Net()
    freezing = Freezing(model, [part(model, "stem", steps=1), part(model, "stem.1", steps=2)])
    freezing.train(Position(global_step=1))
    assert trained(model) == {"stem.0.weight", "stem.0.bias"} | BODY
    assert [module.training for module in model.stem] == [True, False]


def test_what_the_constructor_put_into_evaluation_mode_stays_there():
    model = Net()
    freezing = Freezing(model)
    freezing.train(Position())
    assert model.stem[1].training
    assert not model.quiet.training


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained_all_the_same():
    model = Net().eval()
    Freezing(model).train(Position())
    assert all(module.training for module in model.modules())


def test_what_is_thawed_for_a_look_is_frozen_again():
    model = Net()
    freezing = Freezing(model, [part(model, "stem", steps=3), part(model, "body")])
    freezing.train(Position())
    model.body.eval()

    def seen():
        return [*(p.requires_grad for p in model.parameters()), *(module.training for module in model.modules())]

    before = seen()
    with freezing.as_at(None):
        assert all(parameter.requires_grad for parameter in model.stem.parameters())
        assert not any(parameter.requires_grad for parameter in model.body.parameters())
        assert model.stem.training
        assert not model.body.training
    assert seen() == before
    freezing.follow(Position(global_step=3), ends=True)
    assert trained(model) == STEM
