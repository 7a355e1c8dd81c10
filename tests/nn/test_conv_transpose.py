from __future__ import annotations

import pytest
import torch
from torch import nn

from factorized import FactorizedConvTranspose1d, FactorizedConvTranspose2d
from factorized.testing import error


@pytest.mark.parametrize("execution", ["composed", "chain"])
def test_output_size_chooses_among_the_extents_of_a_stride_as_in_torch(execution: str) -> None:
    dense = nn.ConvTranspose2d(4, 6, 3, stride=3, padding=1).double()
    layer = FactorizedConvTranspose2d.from_dense(dense, 12, execution=execution)  # full rank
    x = torch.randn(2, 4, 5, 4, dtype=torch.float64)
    for output_size in ([13, 10], [15, 12], [14, 11], None):
        assert error(layer(x, output_size=output_size), dense(x, output_size=output_size)) < 1e-12
    with pytest.raises(ValueError, match="requested an output size of"):
        layer(x, [40, 40])


def test_wrong_settings_are_refused_as_torch_does_and_a_way_it_has_not_by_name() -> None:
    with pytest.raises(ValueError, match="groups"):
        FactorizedConvTranspose1d(4, 6, 3, 2, groups=5)
    with pytest.raises(ValueError, match='one of "auto", "composed", "chain", got \'products\''):
        FactorizedConvTranspose2d(4, 6, 3, 2, execution="products")
    with pytest.raises(ValueError, match=r"must be an nn\.ConvTranspose2d, got Conv2d"):
        FactorizedConvTranspose2d.from_dense(nn.Conv2d(4, 6, 3), 2)  # type: ignore[arg-type]


def test_of_a_product_the_thin_channels_come_first() -> None:
    layer = FactorizedConvTranspose2d(8, 6, (3, 5), 2, stride=2, padding=1, output_padding=(1, 0))
    (first, _, _), (second, _, _) = layer.lowered()
    assert repr(first) == (
        "ConvTranspose2d(8, 2, kernel_size=(3, 1), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), bias=False)"
    )
    assert repr(second) == "ConvTranspose2d(2, 6, kernel_size=(1, 5), stride=(1, 2), padding=(0, 1), bias=False)"
