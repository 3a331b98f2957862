"""The Stack model, built on transformers' own Qwen3 classes.

What differs from Qwen3: no rotary embedding on every `nope_every`-th layer; RMSNorm scales in float32 before it casts
(OLMo 2's norm); the residual projections start smaller; optional z-loss and soft caps; packed documents are kept apart
whether or not the model makes a cache. Everything else is inherited, forward passes included, so that attention
implementations, caches, checkpointing and parallel plans are transformers' own, in whatever version is installed.

This file is copied into every saved checkpoint and must load where the package is not installed: it imports nothing
but torch, transformers and its neighbour `configuration_stack`.
"""

# ruff: noqa: RUF012 (class attributes are plain, as in every transformers model)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, eager_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as softcap_attention_forward
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
    Qwen3RotaryEmbedding,
)
from transformers.utils import can_return_tuple

from .configuration_stack import StackConfig

# Eager attention with a soft cap under a name of its own: Qwen3's would leave the cap out without a word.
EAGER_SOFTCAP = "eager_softcap"
AttentionInterface.register(EAGER_SOFTCAP, softcap_attention_forward)
AttentionMaskInterface.register(EAGER_SOFTCAP, eager_mask)


class StackRMSNorm(Olmo2RMSNorm):
    """RMSNorm computed and scaled in float32, then cast to the input's dtype."""


class StackAttention(Qwen3Attention):
    """Qwen3's attention (QK-norm before the rotary embedding), without the rotary embedding on NoPE layers."""

    def __init__(self, config: StackConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        self.use_rope = not config.is_nope_layer(layer_idx)
        self.softcap = config.attn_logit_softcapping
        self.q_norm = StackRMSNorm(self.head_dim, eps=config.rms_norm_eps)  # type: ignore[assignment]
        self.k_norm = StackRMSNorm(self.head_dim, eps=config.rms_norm_eps)  # type: ignore[assignment]
        self.o_proj.writes_residual = True  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Qwen3Attention.forward`; `position_embeddings` are cosines and sines, (batch, length, head_dim) each."""
        if not self.use_rope:
            cos, sin = position_embeddings
            position_embeddings = torch.ones_like(cos), torch.zeros_like(sin)  # a rotation by nothing, exactly
        if self.softcap is not None:
            kwargs["softcap"] = self.softcap
        return super().forward(hidden_states, position_embeddings, *args, **kwargs)


class StackDecoderLayer(Qwen3DecoderLayer):
    """Qwen3's pre-norm layer around Stack's attention and norms."""

    def __init__(self, config: StackConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        self.self_attn = StackAttention(config, layer_idx)
        self.mlp.down_proj.writes_residual = True  # type: ignore[assignment]
        self.input_layernorm = StackRMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # type: ignore[assignment]
        self.post_attention_layernorm = StackRMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # type: ignore[assignment]


class StackPreTrainedModel(Qwen3PreTrainedModel):
    """Initialisation, and what the attention implementations can do."""

    config: StackConfig  # type: ignore[assignment]
    config_class = StackConfig
    _no_split_modules = ["StackDecoderLayer"]
    _can_record_outputs = {"hidden_states": StackDecoderLayer, "attentions": StackAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, 0.02), and N(0, 0.02 / sqrt(2 * layers)) for the two projections that write to the residual stream.

        The narrower draw keeps the residual stream's variance from growing with depth (GPT-2).
        """
        super()._init_weights(module)
        # Marked on the module itself: transformers skips modules without parameters of their own, such as the
        # attention that knows its o_proj, where a class can be loaded as remote code.
        if getattr(module, "writes_residual", False):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)  # type: ignore[arg-type]

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Refuse an attention implementation that would leave the soft cap out; eager is the default with one.

        Raises:
            ValueError: If the config caps the attention logits and the requested implementation cannot.
        """
        if self.config.attn_logit_softcapping is None:
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        if requested_attention in (None, "eager"):
            requested_attention = EAGER_SOFTCAP
        is_flash = "flash" in requested_attention and "paged" not in requested_attention
        if requested_attention not in (EAGER_SOFTCAP, "flex_attention") and not is_flash:
            raise ValueError(
                f"{requested_attention} attention cannot apply attn_logit_softcapping: load the model with "
                'attn_implementation="eager", "flex_attention" or "flash_attention_2"'
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)


class StackModel(StackPreTrainedModel, Qwen3Model):
    """The decoder without its language-model head: token ids to hidden states of shape (batch, length, hidden)."""

    _auto_class = "AutoModel"

    def __init__(self, config: StackConfig) -> None:
        # Past Qwen3Model's own constructor, whose layers would be made and drawn only to be replaced.
        super(Qwen3Model, self).__init__(config)
        self.vocab_size = config.vocab_size
        # No padding_idx: the pad row is drawn and trained like any other, as in the original.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([StackDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = StackRMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # type: ignore[assignment]
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)  # type: ignore[arg-type]
        self.has_sliding_layers = False
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        *args: Any,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder.

        Several documents can share a row: where `position_ids` starts again at 0, a new document starts, and no token
        attends to another document. (Not where a cache is passed in: it holds one document a row.)

        Args:
            input_ids: Token ids of shape (batch, length).
            attention_mask: Shape (batch, seen + length), 1 for tokens and 0 for padding on either side; or a mask that
                is ready for the attention implementation.
            position_ids: Shape (batch, length) or (1, length); counted on from the cache where not given.
            inputs_embeds: Embeddings of shape (batch, length, hidden) in place of `input_ids`.
            *args: Next of `Qwen3Model.forward`'s arguments: the cache of the tokens seen before.
            **kwargs: The rest of them, among them the cache, `use_cache` and what the attention implementation takes.

        Returns:
            The normed hidden states of shape (batch, length, hidden) and the cache.

        Raises:
            ValueError: If not exactly one of `input_ids` and `inputs_embeds` is given, or if rows are both packed and
                padded under flash attention.
        """
        has_cache = any(x is not None for x in (*args[:1], kwargs.get("past_key_values"), kwargs.get("cache")))
        if position_ids is not None and not has_cache and (input_ids is None) != (inputs_embeds is None):
            if inputs_embeds is None:
                inputs_embeds, input_ids = self.embed_tokens(input_ids), None
            attention_mask = self._document_mask(attention_mask, position_ids, inputs_embeds)
        return super().forward(input_ids, attention_mask, position_ids, *args, inputs_embeds=inputs_embeds, **kwargs)  # type: ignore[arg-type, misc]

    def _document_mask(
        self,
        attention_mask: torch.Tensor | dict[str, Any] | None,
        position_ids: torch.Tensor,
        inputs_embeds: torch.Tensor,
    ) -> torch.Tensor | dict[str, Any] | None:
        """The mask of rows without a cache whose positions are given, and that may thus hold several documents.

        transformers keeps documents apart only where there is neither a padding mask nor a cache, and makes a cache
        first: with the default use_cache=True they would attend to one another.

        Args:
            attention_mask: As in `forward`.
            position_ids: Shape (batch, length) or (1, length); a token at position 0 starts a document.
            inputs_embeds: Shape (batch, length, hidden).

        Returns:
            The mask, ready for the attention implementation.

        Raises:
            ValueError: If rows are both packed and padded under flash attention, which reads either of the two.
        """
        same_document: Callable | None = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            compiling = torch.compiler.is_compiling()  # where no branch may depend on values
            tokens = attention_mask.bool()
            documents = ((position_ids == 0) & tokens).cumsum(-1)
            if not compiling and tokens.all():
                attention_mask = None  # transformers then finds the documents by their positions
            elif compiling or (documents[:, -1] > 1).any():
                if "flash" in (self.config._attn_implementation or ""):
                    raise ValueError(
                        "flash attention cannot keep packed documents apart in a padded row: pass no attention_mask, "
                        "and label the padding -100"
                    )

                def same_document(batch: Any, head: Any, query: Any, key: Any) -> Any:
                    return documents[batch, query] == documents[batch, key]

        if isinstance(attention_mask, dict):
            return attention_mask
        mask = create_causal_mask(
            self.config, inputs_embeds, attention_mask, None, position_ids, and_mask_function=same_document
        )
        return {"full_attention": mask}


def z_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Mean of `logsumexp(logits) ** 2` over the tokens that the cross-entropy counts (PaLM, section 5).

    Shifts, ignores and divides as `transformers.loss.loss_utils.ForCausalLMLoss` does, so that it accumulates alike.

    Args:
        logits: Shape (batch, length, vocab).
        labels: Shape (batch, length), unshifted.
        num_items_in_batch: Tokens counted in the whole accumulated batch; the tokens here where not given.
        ignore_index: Label of the tokens that do not count.
        shift_labels: Labels already shifted, which then replace `labels`.

    Returns:
        A float32 scalar.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    valid = (shift_labels != ignore_index).to(logits.device)
    squares = torch.logsumexp(logits.float(), dim=-1).square()
    total = (squares * valid).sum()
    if num_items_in_batch is None:
        return total / valid.sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


class StackForCausalLM(StackPreTrainedModel, Qwen3ForCausalLM):
    """The Stack model with its language-model head."""

    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: StackConfig) -> None:
        # Past Qwen3ForCausalLM's own constructor, which would make a Qwen3Model first.
        super(Qwen3ForCausalLM, self).__init__(config)
        self.model = StackModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def training_loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The cross-entropy, and the z-loss where the config asks for one.

        A trainer that computes the cross-entropy itself from the hidden states leaves the z-loss out (TRL's does). Give
        it a `compute_loss_func` that calls this on the model's logits.

        Args:
            logits: Shape (batch, length, vocab), soft cap applied.
            labels: Shape (batch, length), unshifted; -100 for tokens that do not count.
            **kwargs: `num_items_in_batch` and `shift_labels`, see `forward`.

        Returns:
            A float32 scalar.
        """
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if self.config.z_loss_coef > 0:
            loss = loss + self.config.z_loss_coef * z_loss(logits, labels, **kwargs)
        return loss

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        *args: Any,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the decoder and its head; see `StackModel.forward` for the arguments that are not here.

        Args:
            labels: Shape (batch, length), token ids to predict, unshifted; -100 for tokens that do not count.
            logits_to_keep: Compute the logits of the last so many positions only (0 for all), or of the positions
                that a 1-dimensional tensor names.
            **kwargs: Of the loss, `num_items_in_batch` (tokens counted in the whole accumulated batch, by which the
                cross-entropy and the z-loss are then divided) and `shift_labels`; the rest is the decoder's.

        Returns:
            The loss where there are labels, the logits of shape (batch, kept, vocab) and the cache.
        """
        outputs = super().forward(
            input_ids,  # type: ignore[arg-type]
            attention_mask,  # type: ignore[arg-type]
            position_ids,  # type: ignore[arg-type]
            *args,
            inputs_embeds=inputs_embeds,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **kwargs,
        )
        logits, loss = outputs.logits, None
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        if labels is not None:
            loss = self.training_loss(logits, labels, **kwargs)
        return type(outputs)(**{**outputs, "loss": loss, "logits": logits})


__all__ = ["StackForCausalLM", "StackModel", "StackPreTrainedModel", "z_loss"]
