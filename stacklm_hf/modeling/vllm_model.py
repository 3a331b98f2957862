"""The Stack model for vLLM: its Qwen3, changed where Stack differs from Qwen3.

Contract: computes what `modeling_stack.StackForCausalLM` computes, from the same checkpoint, rounding included. What
differs from Qwen3 is the list there: no rotary embedding on NoPE layers, norms that scale in float32, soft caps. All
else (packed projections, tensor and pipeline parallelism, LoRA, quantisation, compilation) is vLLM's own.

Imported by vLLM alone, when a checkpoint asks for the architecture: see `vllm_plugin`.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM

from stacklm_hf.modeling.configuration_stack import StackConfig


class StackRMSNorm(nn.Module):
    """RMSNorm computed and scaled in float32, then cast; vLLM's own casts before it scales, as Qwen3 does."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalises over the last dimension.

        Args:
            x: Any shape.
            residual: Added first where given, and the sum returned too: vLLM's layers carry it along.
        """
        if residual is not None:
            x = x + residual
        scaled = x.float()
        scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self.eps)
        normed = (self.weight * scaled).to(x.dtype)
        return normed if residual is None else (normed, x)


class NoRotaryEmbedding(nn.Module):
    """Stands in for the rotary embedding of a NoPE layer."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


class StackForCausalLM(Qwen3ForCausalLM):
    """vLLM's Qwen3 with Stack's norms, NoPE layers and soft caps."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: StackConfig = self.config
        model = self.model
        for index, layer in enumerate(islice(model.layers, model.start_layer, model.end_layer), model.start_layer):
            _adapt_layer(layer, config, index)
        if isinstance(getattr(model.norm, "weight", None), nn.Parameter):  # not on the first stages of a pipeline
            model.norm = StackRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.logits_processor.soft_cap = config.final_logit_softcapping


def _adapt_layer(layer: Qwen3DecoderLayer, config: StackConfig, index: int) -> None:
    attention: Qwen3Attention = layer.self_attn
    if config.is_nope_layer(index):
        attention.rotary_emb = NoRotaryEmbedding()
    attention.q_norm = StackRMSNorm(attention.head_dim, config.rms_norm_eps)
    attention.k_norm = StackRMSNorm(attention.head_dim, config.rms_norm_eps)
    layer.input_layernorm = StackRMSNorm(config.hidden_size, config.rms_norm_eps)
    layer.post_attention_layernorm = StackRMSNorm(config.hidden_size, config.rms_norm_eps)
    if config.attn_logit_softcapping is not None:
        attention.attn = _capped(attention, float(config.attn_logit_softcapping))


def _capped(attention: Qwen3Attention, cap: float) -> Attention:
    """The layer's attention over again, with a soft cap on its scores, which Qwen3's constructor has no place for.

    Raises:
        ValueError: If vLLM's attention backend on this machine has no soft cap.
    """
    plain: Attention = attention.attn
    vllm_config = get_current_vllm_config()
    del vllm_config.compilation_config.static_forward_context[plain.layer_name]
    try:
        capped = Attention(
            attention.num_heads,
            attention.head_dim,
            attention.scaling,
            num_kv_heads=attention.num_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            logits_soft_cap=cap,
            prefix=plain.layer_name,
        )
        applied = getattr(capped.impl, "logits_soft_cap", None)
    except NotImplementedError:
        applied = None
    if applied != cap:
        raise ValueError(
            f"vLLM's attention backend {plain.backend.name} cannot apply attn_logit_softcapping: choose another one "
            "(attention_backend=...), or a model without it"
        )
    return capped


__all__ = ["StackForCausalLM"]
