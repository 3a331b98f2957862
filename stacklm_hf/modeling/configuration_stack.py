"""Configuration of the Stack architecture, and its named sizes.

This file is copied into every saved checkpoint (see `auto_map`) and must load where the package is not installed:
it imports nothing but transformers and huggingface_hub.
"""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# The control tokens are the last nine ids of a native vocabulary; these are their distances from its end.
_BOS_FROM_END, _PAD_FROM_END, _END_FROM_END = 9, 7, 3

AUTO_MAP: dict[str, str] = {
    "AutoConfig": "configuration_stack.StackConfig",
    "AutoModel": "modeling_stack.StackModel",
    "AutoModelForCausalLM": "modeling_stack.StackForCausalLM",
}

PRESETS: dict[str, dict[str, Any]] = {
    # The published model: 101,353,728 parameters, 84,576,512 without the embedding.
    "stack-100m": {},
    # Small enough to learn the research world on two CPU cores.
    "stack-demo": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    },
}


@strict
class StackConfig(Qwen3Config):
    """Configuration of a Stack model: Qwen3's blocks, with no rotary embedding on every `nope_every`-th layer.

    The defaults are those of Stack-100M. All arguments of `transformers.Qwen3Config` are accepted.

    Args:
        nope_every (`int`, defaults to 4): Layers `nope_every - 1, 2 * nope_every - 1, ...` apply no rotary embedding
            (NoPE). 0 switches NoPE off: every layer is then rotary, and the model is a plain Qwen3.
        z_loss_coef (`float`, defaults to 0.0): Weight of the z-loss, the mean of `logsumexp(logits) ** 2` over the
            tokens that the cross-entropy counts. 0 switches it off; Stack-100M was trained with 1e-4.
        final_logit_softcapping (`float`, *optional*): Cap `c` of the logits, `c * tanh(logits / c)`, in training and
            inference alike.
        attn_logit_softcapping (`float`, *optional*): The same cap on the attention scores, before the mask. Needs
            eager, flex or flash attention: sdpa has no place for it.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Where not given, the ids of `<|pad|>`, `<|bos|>`
            and `<|end|>` (which ends a turn) in a native vocabulary of `vocab_size` tokens.

    Example:
        >>> config = StackConfig.from_preset("stack-100m", z_loss_coef=1e-4)
        >>> config.nope_layers
        [3, 7, 11, 15, 19, 23, 27]
    """

    model_type = "stack"
    # Gemma 2's names for the two caps are the ones that the ecosystem reads; these are the native ones.
    attribute_map: ClassVar[dict[str, str]] = {
        "logit_soft_cap": "final_logit_softcapping",
        "attn_soft_cap": "attn_logit_softcapping",
    }

    vocab_size: int = 32768
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    nope_every: int = 4
    z_loss_coef: float = 0.0
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # A native 0 means off.
        self.final_logit_softcapping = self.final_logit_softcapping or None
        self.attn_logit_softcapping = self.attn_logit_softcapping or None
        if self.vocab_size >= _BOS_FROM_END:
            if self.bos_token_id is None:
                self.bos_token_id = self.vocab_size - _BOS_FROM_END
            if self.pad_token_id is None:
                self.pad_token_id = self.vocab_size - _PAD_FROM_END
            if self.eos_token_id is None:
                self.eos_token_id = self.vocab_size - _END_FROM_END
        # TRL and vLLM look the classes up here, in memory as well as in a saved folder.
        kwargs["auto_map"] = {**AUTO_MAP, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> StackConfig:
        """Build the configuration of a named size.

        Args:
            name: One of `PRESETS`: "stack-100m" or "stack-demo".
            **overrides: Arguments that replace those of the preset.

        Raises:
            ValueError: If there is no such size.
        """
        if name not in PRESETS:
            raise ValueError(f"no size is named {name!r}; choose one of {', '.join(sorted(PRESETS))}")
        return cls(**{**PRESETS[name], **overrides})

    def is_nope_layer(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` (from 0) goes without rotary embedding."""
        return self.nope_every > 0 and (layer_idx + 1) % self.nope_every == 0

    @property
    def nope_layers(self) -> list[int]:
        """Indices of the layers without rotary embedding, in order."""
        return [i for i in range(self.num_hidden_layers) if self.is_nope_layer(i)]


__all__ = ["AUTO_MAP", "PRESETS", "StackConfig"]
