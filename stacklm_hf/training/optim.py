"""Muon for the matrices of the blocks, AdamW for all other parameters, as one optimizer.

Contract: to a trainer it is an ordinary `torch.optim.Optimizer`: one list of parameter groups that a scheduler
can drive, one state dict that resumes it. Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/)
moves a matrix along the orthogonalised momentum of its gradient; it is defined for matrices inside the network,
not for embeddings, the output head, norms and biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` behind one interface.

    Args:
        muon_params: Matrices, all of them two-dimensional.
        adamw_groups: Parameter groups for AdamW.
        muon_lr: Learning rate of Muon; a step has the root mean square of an AdamW step of the same rate
            (`adjust_lr_fn="match_rms_adamw"`).
        lr: Learning rate of AdamW.
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Of the matrices; the groups bring their own.
        momentum: Of Muon.
    """

    def __init__(
        self,
        muon_params: list[nn.Parameter],
        adamw_groups: list[dict[str, Any]],
        *,
        muon_lr: float,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ):
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                muon_params, lr=muon_lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(adamw_groups, lr=lr, betas=betas, eps=eps),
        )
        # The very dicts of the two parts, so that a scheduler's change of a rate reaches them.
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        """Takes a step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of both."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of both.

        Raises:
            ValueError: It is the state of another optimizer.
        """
        parts = state_dict.get("parts", ())
        if len(parts) != len(self._parts):
            raise ValueError("the checkpoint was written with another optimizer: set muon_learning_rate as it was")
        for part, state in zip(self._parts, parts, strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]


class MuonFactory:
    """Makes a :class:`MuonWithAdamW` for a model; the form that `Trainer(optimizer_cls_and_kwargs=...)` takes."""

    def __call__(self, model: nn.Module, *, weight_decay: float = 0.0, **options: Any) -> MuonWithAdamW:
        """Matrices of the blocks go to Muon; embeddings, heads, norms and biases to AdamW, without decay.

        Raises:
            ValueError: The model has no matrix to train, e.g. with adapters frozen.
        """
        outside = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        }
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        if head is not None:
            outside.update(id(parameter) for parameter in head.parameters())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in outside]
        if not matrices:
            raise ValueError("no matrix inside the model is trained: leave muon_learning_rate unset")
        chosen = set(map(id, matrices))
        others = [parameter for parameter in trained if id(parameter) not in chosen]
        groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.0}]
        return MuonWithAdamW(matrices, groups, weight_decay=weight_decay, **options)
