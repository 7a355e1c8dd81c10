"""peft: LoRA adapters on factorized linear layers, merged exactly by making the product wider."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from factorized.nn.layer import FactorizedLayer
from factorized.nn.linear import FactorizedLinear

# Those that do not change the layer's weight; the others subtract from it what they put into the adapter.
INITS = (True, False, "gaussian", "orthogonal", "eva")


def on_factorized(config: LoraConfig) -> LoraConfig:
    """Make ``config`` also target factorized linear layers, and return it.

    ``get_peft_model(model, on_factorized(LoraConfig(target_modules=[...])))`` trains adapters beside the frozen
    factors. peft does not save this setting: load a saved adapter with
    ``PeftModel.from_pretrained(model, folder, config=on_factorized(LoraConfig.from_pretrained(folder)))``.
    ``target_modules="all-linear"`` finds only plain linears: name the layers instead.

    Raises:
        ValueError: ``target_modules`` is ``"all-linear"``; when the adapters are added, if ``init_lora_weights`` would
            change the weight of a layer.

    Examples:
        >>> from peft import LoraConfig, get_peft_model
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> config = fz.integrations.on_factorized(LoraConfig(r=4, target_modules=["0"]))
        >>> get_peft_model(model, config).print_trainable_parameters()
        trainable params: 512 || all params: 1,600 || trainable%: 32.0000
    """
    if config.target_modules == "all-linear":
        raise ValueError(
            'target_modules="all-linear" finds only plain linears; name the layers, such as ["q_proj", "up_proj"]'
        )
    config._register_custom_module({FactorizedLinear: LoraFactorizedLinear})
    return config


class LoraFactorizedLinear(Linear):
    """A factorized linear layer with LoRA adapters beside it.

    To merge an adapter ``s B A`` into ``U Vᵀ`` the factors are concatenated: ``[U, s B] [V, Aᵀ]ᵀ`` has the sum of both
    ranks and is exact, while the sum at the old rank would lose part of it.
    """

    _before_merge: list[FactorizedLayer]

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """Only plain LoRA: the variants write to the weight, or depend on its norm."""
        return {(): None}

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter."""
        if config.init_lora_weights not in INITS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} changes the weight of the layer, but that of a "
                f"factorized one is computed from factors; use one of {', '.join(map(repr, INITS))}. To train the "
                "leading part of a weight beside a frozen rest, as PiSSA does, see fz.Residual"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Make the product wider by the active adapters, or by those named."""
        base: Any = self.get_base_layer()
        if isinstance(base, nn.Sequential):
            raise ValueError("an adapter cannot be merged into the layers that fz.lower makes; merge it before")
        if not isinstance(base, FactorizedLayer):  # fz.compose has made it dense
            super().merge(safe_merge, adapter_names)
            return
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        wide: Any = base
        for name in names:
            wide = _widened(wide, *self._scaled(name))
            if safe_merge and not all(parameter.isfinite().all() for parameter in wide.parameters()):
                raise ValueError(f"the adapter {name!r} holds NaN or infinite values; it was not merged")
        if names:
            self._before_merge = self._before_merge if self.merged else [base]  # a list, so that it is no submodule
            self.base_layer = wide
            self.merged_adapters += names

    def unmerge(self) -> None:
        """Restore the product from before merging."""
        base = self.get_base_layer()
        if not self.merged or not isinstance(base, FactorizedLayer):
            super().unmerge()
            return
        (before,) = self._before_merge
        self.base_layer = before.to(device=base.factors[0].device, dtype=base.factors[0].dtype)
        self.merged_adapters.clear()

    def _scaled(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return an adapter as ``s B`` (out, r), ``Aᵀ`` (in, r) and what it adds to the bias."""
        A, B = self.lora_A.get_parameter(f"{name}.weight"), self.lora_B.get_parameter(f"{name}.weight")
        bias = self.lora_B.get_parameter(f"{name}.bias") if self.lora_bias[name] else None
        scale = self.scaling[name]
        return B * scale, A.mT, None if bias is None else bias * scale


@torch.no_grad()
def _widened(
    layer: FactorizedLinear,
    U: Tensor,  # (out, r)
    V: Tensor,  # (in, r)
    bias: Tensor | None,  # (out,)
) -> FactorizedLinear:
    """Return a layer with the weight of ``layer`` plus ``U Vᵀ``, and its bias plus ``bias``."""
    dtype, trains = layer.factors[0].dtype, layer.factors[0].requires_grad
    added = (part.to(dtype) for part in ((V, U) if layer.transposed else (U, V)))
    format, factors = layer.format.plus(layer.factors, *added)
    wider = FactorizedLinear(
        layer.in_features,
        layer.out_features,
        format,
        layer.bias is not None,
        init=None,
        dense_type=layer.dense_type,
        device=layer.factors[0].device,
        dtype=dtype,
    )
    wider.set_factors(*factors)
    wider.requires_grad_(trains)
    wider.bias = layer.bias
    if bias is not None:
        if layer.bias is None:
            raise ValueError("an adapter with lora_bias=True cannot be merged into a layer without a bias")
        wider.bias = nn.Parameter(layer.bias + bias, layer.bias.requires_grad)
    layer.hand_over(wider)
    return wider.train(layer.training)
