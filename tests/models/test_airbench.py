"""The network of airbench94."""

import pytest
import torch
from torch import nn

from runner.models.airbench import Airbench


def test_it_has_the_published_size_and_no_scale_in_its_norms() -> None:
    model = Airbench(3, 10)
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 1_971_640
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert not any(norm.weight.requires_grad for norm in norms)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("place", [0, 4])
def test_a_new_convolution_passes_its_inputs_on(place: int) -> None:
    layer = Airbench(1, 5, widths=(12, 16, 16)).stages[1][place]
    images = torch.randn(2, layer.in_channels, 6, 6)
    torch.testing.assert_close(layer(images)[:, : layer.in_channels], images)
