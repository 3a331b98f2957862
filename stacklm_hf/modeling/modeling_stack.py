"""The Stack model, built on transformers' own Qwen3 blocks.

What differs from Qwen3: no rotary embedding on every `nope_every`-th layer; RMSNorm scales in float32 before it casts
(OLMo 2's norm); the residual projections start smaller; optional z-loss and soft caps.

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
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3PreTrainedModel,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_stack import StackConfig


class StackRMSNorm(Olmo2RMSNorm):
    """RMSNorm computed and scaled in float32, then cast to the input's dtype."""


class StackAttention(Qwen3Attention):
    """Qwen3's attention (QK-norm before the rotary embedding), without the rotary embedding on NoPE layers."""

    def __init__(self, config: StackConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        self.use_rope = not config.is_nope_layer(layer_idx)
        self.softcap = config.attn_logit_softcapping
        self.o_proj.writes_residual = True  # type: ignore[assignment]
        self.q_norm = StackRMSNorm(self.head_dim, eps=config.rms_norm_eps)  # type: ignore[assignment]
        self.k_norm = StackRMSNorm(self.head_dim, eps=config.rms_norm_eps)  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        if self.use_rope:
            cos, sin = position_embeddings
            query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        if past_key_values is not None:
            key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            **kwargs,
        )
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(attn_output), attn_weights


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
        """Refuse an attention implementation that would leave out the soft cap without a word; eager by default.

        Raises:
            ValueError: If the config caps the attention logits and the requested implementation cannot.
        """
        if self.config.attn_logit_softcapping is not None:
            requested_attention = requested_attention or "eager"
            is_flash = is_flash_attention_requested(requested_attention_implementation=requested_attention)
            if requested_attention not in ("eager", "flex_attention") and (
                not is_flash or "paged" in requested_attention
            ):
                raise ValueError(
                    f"{requested_attention} attention cannot apply attn_logit_softcapping: load the model with "
                    'attn_implementation="eager", "flex_attention" or "flash_attention_2"'
                )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)


class StackModel(StackPreTrainedModel):
    """The decoder without its language-model head: token ids to hidden states of shape (batch, length, hidden)."""

    _auto_class = "AutoModel"

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.vocab_size = config.vocab_size
        # No padding_idx: the pad row is drawn and trained like any other, as in the original.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([StackDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = StackRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder.

        Several documents can share a row: where `position_ids` starts again at 0, a new document starts, and no token
        attends to another document.

        Args:
            input_ids: Token ids of shape (batch, length).
            attention_mask: Shape (batch, seen + length), 1 for tokens and 0 for padding on either side; or a mask that
                is ready for the attention implementation, of shape (batch, 1, length, seen + length).
            position_ids: Shape (batch, length) or (1, length); counted on from the cache where not given.
            past_key_values: Cache of the tokens seen before.
            inputs_embeds: Embeddings of shape (batch, length, hidden) in place of `input_ids`.
            use_cache: Whether to return the cache; `config.use_cache` where not given.
            **kwargs: What the attention implementation takes.

        Returns:
            The normed hidden states of shape (batch, length, hidden) and the cache.

        Raises:
            ValueError: If not exactly one of `input_ids` and `inputs_embeds` is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        same_document = None
        if position_ids is None:
            past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
            positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = positions.unsqueeze(0)
        elif past_key_values is None and isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            attention_mask, same_document = self._separate_documents(attention_mask, position_ids)
        # Before a cache of our own is made: transformers looks for packed documents only where there is no cache, and
        # the default use_cache=True would let them attend to one another.
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            and_mask_function=same_document,
        )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )

    def _separate_documents(
        self, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor | None, Callable | None]:
        """Keep packed documents apart where a padding mask comes along too, which transformers does not.

        Args:
            attention_mask: Shape (batch, length), 0 for padding.
            position_ids: Shape (batch, length) or (1, length); a token at position 0 starts a document.

        Returns:
            The padding mask, None where it masks nothing (transformers then finds the documents itself), and a mask
            function that is true within a document, None where no row holds several.

        Raises:
            ValueError: If rows are both packed and padded under flash attention, which reads either of the two.
        """
        tokens = attention_mask.bool()
        compiling = torch.compiler.is_compiling()  # where no branch may depend on values
        if not compiling and tokens.all():
            return None, None
        documents = ((position_ids == 0) & tokens).cumsum(-1)
        if not compiling and (documents[:, -1] <= 1).all():
            return attention_mask, None
        if is_flash_attention_requested(self.config):
            raise ValueError(
                "flash attention cannot keep packed documents apart in a padded row: pass no attention_mask, "
                "and label the padding -100"
            )
        return attention_mask, packed_sequence_mask_function(documents)


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


class StackForCausalLM(StackPreTrainedModel, GenerationMixin):
    """The Stack model with its language-model head."""

    _auto_class = "AutoModelForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
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
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the decoder and its head; see `StackModel.forward` for the arguments that are not here.

        Args:
            labels: Shape (batch, length), token ids to predict, unshifted; -100 for tokens that do not count.
            logits_to_keep: Compute the logits of the last so many positions only (0 for all), or of the positions
                that a 1-dimensional tensor names.
            **kwargs: Of the loss, `num_items_in_batch` (tokens counted in the whole accumulated batch, by which the
                cross-entropy and the z-loss are then divided) and `shift_labels`; the rest is the attention's.

        Returns:
            The loss where there are labels, the logits of shape (batch, kept, vocab) and the cache.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])  # type: ignore[index]
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap

        loss = None
        if labels is not None:
            loss = self.training_loss(logits, labels, **kwargs)

        return CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


__all__ = ["StackForCausalLM", "StackModel", "StackPreTrainedModel", "z_loss"]
