"""The weights of a model in training, as something else wants to read them: whole, and under plain names.

Contract: reading writes nothing. A LoRA is merged into a copy, so that no number of syncs can move the base by a
bit; a sharded model is gathered for the time of the block and sharded again after it. All processes enter a
block together, since gathering is a collective operation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel, Trainer


@contextmanager
def whole_model(trainer: Trainer) -> Iterator[PreTrainedModel]:
    """The trainer's own model, unwrapped, with every parameter whole on this process.

    Within the block a forward pass communicates with nobody, so the processes may run different numbers of them.

    Args:
        trainer: A trainer; plain, DDP, DeepSpeed (any ZeRO stage) or FSDP 2.

    Raises:
        ValueError: The model is sharded by FSDP 1, whose modules cannot run outside of a common forward.
    """
    from trl.models import unwrap_model_for_generation

    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            yield model
        return
    if plugin.fsdp_version != 2:
        raise ValueError("episodes cannot be sampled from a model under FSDP 1: set fsdp_version: 2")
    with unsharded(trainer.model_wrapped, bool(plugin.reshard_after_forward)):
        yield trainer.accelerator.unwrap_model(trainer.model_wrapped)


@contextmanager
def unsharded(model: nn.Module, reshard_after_forward: bool = True) -> Iterator[None]:
    """Gathers all parameters of a model under FSDP 2, and keeps them gathered through forward passes.

    Args:
        model: The root module; may hold modules that are not sharded.
        reshard_after_forward: What the sharded modules go back to.
    """
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(reshard_after_forward, recurse=False)
            module.reshard()


@contextmanager
def plain_weights(trainer: Trainer) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """The weights as an inference engine loads them: the names of the architecture, adapters merged.

    Args:
        trainer: See :func:`whole_model`.

    Yields:
        `(name, tensor)` of each parameter, a tied one once. The tensors are valid within the block.
    """
    with whole_model(trainer) as model:
        plain: Any = model
        if is_peft_model(model):
            plain = copy.deepcopy(plain).merge_and_unload()
        yield ((name, parameter.detach()) for name, parameter in plain.named_parameters())
