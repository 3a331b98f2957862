"""Makes any causal language model of transformers a student: adds the nine control tokens to it and its tokenizer.

Contract: the vocabulary of the model never shrinks, rows that the model came with are not touched, rows of new
tokens start as the mean of the old ones (they then neither attract nor repel any prediction; Hewitt 2021,
"Initializing New Word Embeddings for Pretrained Language Models") and train like all others. The same call twice
changes nothing the second time, so a recipe may call it on a base model and on a checkpoint alike.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stacklm_hf.protocol.template import RESPONSE_TEMPLATE, build_chat_template
from stacklm_hf.protocol.tokens import END, PAD, SPECIAL_TOKENS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentTokens:
    """What :func:`add_agent_tokens` did, and what a LoRA needs to know of it.

    Args:
        token_ids: Control token to id, all nine.
        initialized_rows: Ids whose rows were set to the mean in this call; empty where nothing was new.
        trainable_token_indices: For `peft.LoraConfig(trainable_token_indices=...)`: the nine rows of the input
            embedding and, untied, of the output layer. A LoRA freezes the embeddings, so without it (or
            `modules_to_save`, which keeps a whole copy) the control tokens would never be learnt.
    """

    token_ids: dict[str, int]
    initialized_rows: tuple[int, ...] = ()
    trainable_token_indices: dict[str, list[int]] = field(default_factory=dict)

    @property
    def modules_to_save(self) -> list[str]:
        """For `peft.LoraConfig(modules_to_save=...)`: the same layers, trained and saved whole.

        Where the embeddings are tied, give `ensure_weight_tying=True` as well.
        """
        return list(self.trainable_token_indices)


def add_agent_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> AgentTokens:
    """Adds the nine control tokens to a model and its tokenizer, in place.

    The tokenizer gets the tokens it lacks, in id order behind its own, `<|end|>` as its end and `<|pad|>` as its
    padding, the chat template and the response template. The model gets rows for them: the spare rows of a padded
    vocabulary first, new ones where those do not suffice. Its config and generation config are set to the same
    end and padding. A token that the tokenizer has already keeps its id and its trained row.

    Args:
        model: Any `AutoModelForCausalLM`, embeddings tied or not. Call it before PEFT wraps the model.
        tokenizer: The model's own fast tokenizer.

    Returns:
        The ids, and the layers and rows that a LoRA must train.

    Raises:
        TypeError: The tokenizer has no `tokenizers` backend.
        ValueError: The tokenizer and the model do not belong together.
    """
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise TypeError(f"{type(tokenizer).__name__} has no `tokenizers` backend: load it with AutoTokenizer")
    known = tokenizer.get_vocab()
    vocab_end = max(known.values()) + 1
    rows = len(model.get_input_embeddings().get_parameter("weight"))
    missing = [token for token in SPECIAL_TOKENS if token not in known]
    if vocab_end > rows and missing:
        raise ValueError(
            f"the tokenizer has ids up to {vocab_end - 1}, the model only {rows} rows: load the tokenizer of this model"
        )

    _extend_tokenizer(tokenizer)
    vocab = tokenizer.get_vocab()
    token_ids = {token: vocab[token] for token in SPECIAL_TOKENS}
    new_end = max(vocab.values()) + 1
    if new_end > rows:
        model.resize_token_embeddings(new_end, mean_resizing=False)
    new_rows = sorted({token_ids[token] for token in missing} | set(range(rows, new_end)))
    _initialize_rows(model, new_rows, num_old=min(vocab_end, rows))
    _align_configs(model, token_ids)
    if new_rows:
        logger.info("added %d control tokens; the model has %d rows", len(missing), max(rows, new_end))
    return AgentTokens(token_ids, tuple(new_rows), _embedding_rows(model, list(token_ids.values())))


def _extend_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    # A host may know one of the tokens with other manners, e.g. as one that swallows the blanks behind it:
    # adding it again keeps its id and makes it exact.
    exact = {token: AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS}
    tokenizer.add_tokens(list(exact.values()), special_tokens=True)
    tokenizer.add_special_tokens({"eos_token": exact[END], "pad_token": exact[PAD]})
    others = [exact[token] for token in SPECIAL_TOKENS if token not in (tokenizer.bos_token, END, PAD)]
    tokenizer.add_special_tokens({"extra_special_tokens": others}, replace_extra_special_tokens=False)
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    tokenizer.chat_template = build_chat_template(sorted(token.content for token in added if token.special))
    tokenizer.response_template = RESPONSE_TEMPLATE
    # Decoder-only: a batch is continued at its right end. Only what stands in `init_kwargs` is saved.
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"


@torch.no_grad()
def _initialize_rows(model: PreTrainedModel, rows: list[int], num_old: int) -> None:
    """Sets rows of the embeddings (and of an untied output layer, bias included) to the mean of the old ones."""
    if not rows:
        return
    old = [index for index in range(num_old) if index not in set(rows)]
    for layer in _embedding_layers(model):
        for weight in layer.parameters(recurse=False):
            weight[rows] = weight[old].mean(dim=0, dtype=torch.float32).to(weight.dtype)


def _embedding_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The input embedding and, unless its weight is the same one, the output layer."""
    layers = [model.get_input_embeddings()]
    output = model.get_output_embeddings()
    if output is not None and output.weight is not layers[0].weight:
        layers.append(output)
    return layers


def _embedding_rows(model: PreTrainedModel, rows: list[int]) -> dict[str, list[int]]:
    """Name of each embedding layer, as PEFT matches it, to the rows."""
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    return {names[id(layer)]: list(rows) for layer in _embedding_layers(model)}


def _align_configs(model: PreTrainedModel, token_ids: dict[str, int]) -> None:
    """One end and one padding for config and generation config, as the tokenizer has them."""
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        if config is not None:
            config.eos_token_id = token_ids[END]
            config.pad_token_id = token_ids[PAD]
