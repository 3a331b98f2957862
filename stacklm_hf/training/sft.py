"""Supervised fine-tuning: TRL's SFTTrainer on the dataset's `input_ids` and `assistant_masks`.

Contract: the loss covers exactly the tokens that the policy of a trajectory wrote. Batches are grouped by
length, so that little of what is computed is padding; the share is logged as `padding_share`. A run resumes
from its newest checkpoint to the same loss curve.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import get_last_checkpoint
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from stacklm_hf.data.dataset import check_columns
from stacklm_hf.modeling.add_tokens import AgentTokens
from stacklm_hf.training.optim import MuonFactory
from stacklm_hf.training.sampler import LengthGroupedBatchSampler

logger = logging.getLogger(__name__)


@dataclass
class AgentSFTConfig(SFTConfig):
    """TRL's SFTConfig, and what this package adds.

    Args:
        muon_learning_rate: See the field's help text; all other options are TRL's.
    """

    muon_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Train the matrices of the blocks with Muon at this learning rate, and the rest with AdamW at "
            "learning_rate. Unset or 0: everything with the optimizer that `optim` names. A small model from random "
            "weights learns in about half the steps with it."
        },
    )


def cpu_supports_bf16() -> bool:
    """Whether matrix products in bfloat16 have hardware behind them on this CPU."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class AgentSFTTrainer(SFTTrainer):
    """SFTTrainer with batches of like length in random order, the share of padding in the log, and the z-loss of a
    Stack model.

    TRL's own loss is computed from the hidden states, past the model's loss; a model with a z-loss is asked for
    its loss instead.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cells = self._padding = 0

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(dataset, Dataset):
            return super()._get_train_sampler(train_dataset)
        lengths = [len(ids) for ids in dataset["input_ids"]]
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return LengthGroupedBatchSampler(lengths, self.args.train_batch_size, seed)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        mask = inputs.get("attention_mask")
        assert self.model is not None
        if self.model.training and mask is not None:
            self._cells += mask.numel()
            self._padding += mask.numel() - int(mask.sum())
        if getattr(self.model.config, "z_loss_coef", 0.0):
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @property
    def padding_share(self) -> float:
        """Padding among all tokens computed so far, 0 to 1."""
        return self._padding / self._cells if self._cells else 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["padding_share"] = round(self.padding_share, 4)
        super().log(logs, start_time)


def default_sft_config(output_dir: str | Path, **overrides: Any) -> AgentSFTConfig:
    """The configuration with the defaults of this package; every one can be overridden.

    Batches are grouped by length, nothing is cut, precision is bfloat16 where the hardware has it, metrics go to
    TensorBoard.
    """
    on_cpu = not torch.cuda.is_available()
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 8,
        "train_sampling_strategy": "group_by_length",
        "max_length": 1024,
        # Few distinct widths: the allocator then reuses its blocks, and kernels are prepared once.
        "pad_to_multiple_of": 16,
        "packing": False,
        "bf16": cpu_supports_bf16() if on_cpu else torch.cuda.is_bf16_supported(),
        "use_cpu": on_cpu,
        "gradient_checkpointing": False,
        "logging_steps": 25,
        "save_strategy": "steps",
        "save_steps": 200,
        "save_total_limit": 2,
        "report_to": "tensorboard",
        "disable_tqdm": False,
        "dataloader_pin_memory": not on_cpu,
    }
    return AgentSFTConfig(**{**values, **overrides})


def make_trainer(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    config: AgentSFTConfig,
    *,
    peft_config: Any = None,
    eval_dataset: Dataset | None = None,
) -> AgentSFTTrainer:
    """A trainer over a dataset of trajectories.

    Raises:
        ValueError: The dataset lacks the columns, or an example is longer than `config.max_length` (which would
            cut it).
    """
    check_columns(dataset)
    if not len(dataset):
        raise ValueError("the dataset is empty: collect trajectories first")
    longest = max(map(len, dataset["input_ids"]))
    if config.max_length is not None and longest > config.max_length:
        raise ValueError(
            f"an example has {longest} tokens, max_length is {config.max_length}: raise it, or build the dataset "
            "with this max_length so that longer trajectories are dropped and counted"
        )
    columns = ["input_ids", "assistant_masks"]
    optimizer = None
    if config.muon_learning_rate:
        options = {
            "lr": config.learning_rate,
            "muon_lr": config.muon_learning_rate,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_epsilon,
            "weight_decay": config.weight_decay,
        }
        optimizer = (MuonFactory, options)
    return AgentSFTTrainer(
        model=model,
        args=config,
        train_dataset=dataset.select_columns(columns),
        eval_dataset=eval_dataset.select_columns(columns) if eval_dataset is not None else None,
        processing_class=tokenizer,
        peft_config=peft_config,
        optimizer_cls_and_kwargs=optimizer,
    )


def make_peft_config(arguments: ModelConfig, tokens: AgentTokens | None = None) -> Any:
    """TRL's PEFT configuration of a recipe's arguments, with the rows of the control tokens trained as well.

    Args:
        arguments: TRL's model arguments.
        tokens: What `add_agent_tokens` returned. An adapter freezes the embeddings, so new rows would stay as
            they are without it.

    Returns:
        A `peft.LoraConfig`, None without `--use_peft`; of all linear layers where `--lora_target_modules` names none.
    """
    if arguments.use_peft and arguments.lora_target_modules is None:
        # PEFT knows no defaults for an architecture that it does not list, and this one suits all.
        arguments = replace(arguments, lora_target_modules=["all-linear"])
    config: Any = get_peft_config(arguments)
    if config is not None and tokens is not None and tokens.initialized_rows:
        config.trainable_token_indices = tokens.trainable_token_indices
    return config


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint of a run, None without one."""
    if not Path(output_dir).is_dir():
        return None
    found = get_last_checkpoint(str(output_dir))
    # A kill in the middle of a save leaves a folder without its last file.
    while found is not None and not (Path(found) / "trainer_state.json").is_file():
        logger.warning("%s is not whole (killed while it was written?), going back to the one before", found)
        Path(found).rename(Path(found).with_name("broken-" + Path(found).name))
        found = get_last_checkpoint(str(output_dir))
    return found
