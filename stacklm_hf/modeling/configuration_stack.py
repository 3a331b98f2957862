"""Configuration of the Stack architecture, and its named sizes.

This file is copied into every saved checkpoint and must load where the package is not installed; and it is imported
while transformers' own modules are still loading (see `registration`). So it imports transformers' configuration base
and nothing else of it.
"""

# No postponed annotations here: `strict` reads the types of the fields to check their values.
import math
from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

# The control tokens are the last nine ids of a native vocabulary; these are distances from its end.
_BOS_FROM_END, _PAD_FROM_END, _END_FROM_END = 9, 7, 3

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_NOT_NEGATIVE = ("rms_norm_eps", "nope_every", "z_loss_coef", "final_logit_softcapping", "attn_logit_softcapping")

AUTO_MAP: dict[str, str] = {
    "AutoConfig": "configuration_stack.StackConfig",
    "AutoModel": "modeling_stack.StackModel",
    "AutoModelForCausalLM": "modeling_stack.StackForCausalLM",
}

PRESETS: dict[str, dict[str, Any]] = {
    # The published model: 101,353,728 parameters, 84,576,512 without the embedding. The defaults of StackConfig.
    "stack-100m": {},
    # Small enough to learn the research world on two CPU cores in minutes.
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
class StackConfig(PreTrainedConfig):
    """Configuration of a Stack model: Qwen3's blocks, with no rotary embedding on every `nope_every`-th layer.

    The defaults are those of Stack-100M.

    Args:
        vocab_size (`int`, defaults to 32768): Rows of the embedding, control and padding tokens included.
        hidden_size (`int`, defaults to 512): Width of the residual stream.
        intermediate_size (`int`, defaults to 1408): Inner width of the SwiGLU.
        num_hidden_layers (`int`, defaults to 30): Number of layers.
        num_attention_heads (`int`, defaults to 8): Number of query heads.
        num_key_value_heads (`int`, *optional*, defaults to 2): Number of key and value heads, each shared by a group
            of query heads. None for as many as query heads.
        head_dim (`int`, defaults to 64): Dimension of a head.
        hidden_act (`str`, defaults to `"silu"`): Activation of the gate.
        max_position_embeddings (`int`, defaults to 2048): Context length in tokens.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the initial weights; divided by
            `sqrt(2 * num_hidden_layers)` for the two projections that write to the residual stream.
        rms_norm_eps (`float`, defaults to 1e-5): Epsilon of the norms.
        use_cache (`bool`, defaults to True): Whether the model returns its key-value cache.
        tie_word_embeddings (`bool`, defaults to True): Whether the head shares the embedding's weight.
        rope_parameters (`dict`, *optional*): Rotary embedding, as in every transformers model. The base is 10000
            where not given.
        attention_bias (`bool`, defaults to False): Whether the attention projections have a bias.
        attention_dropout (`float`, defaults to 0.0): Dropout of the attention weights in training.
        nope_every (`int`, defaults to 4): Layers `nope_every - 1, 2 * nope_every - 1, ...` (from 0) apply no rotary
            embedding (NoPE). 0 switches NoPE off: every layer is then rotary, as in a Qwen3.
        z_loss_coef (`float`, defaults to 0.0): Weight of the z-loss, the mean of `logsumexp(logits) ** 2` over the
            tokens that the cross-entropy counts. 0 switches it off; Stack-100M was trained with 1e-4.
        final_logit_softcapping (`float`, *optional*): Cap `c` of the logits, `c * tanh(logits / c)`, in training and
            inference alike. 0 is read as None.
        attn_logit_softcapping (`float`, *optional*): The same cap on the attention scores, before the mask. Needs
            eager, flex or flash attention: sdpa has no place for it. 0 is read as None.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Where not given, the ids of `<|pad|>`, `<|bos|>`
            and `<|end|>` (which ends a turn) in a native vocabulary of `vocab_size` tokens.

    Raises:
        huggingface_hub.errors.StrictDataclassError: If a value has the wrong type, or the sizes do not fit together.

    Example:
        >>> config = StackConfig.from_preset("stack-100m", z_loss_coef=1e-4)
        >>> config.nope_layers
        [3, 7, 11, 15, 19, 23, 27]
    """

    model_type = "stack"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    _auto_class: ClassVar[str | None] = "AutoConfig"
    # Called before the first config exists, the moment from which an Auto class can ask for its model. Set by the
    # package's `registration`, and None in the copy beside a checkpoint, where `auto_map` does that work.
    _before_first_use: ClassVar[Callable[[], None] | None] = None

    base_model_tp_plan: ClassVar[dict[str, Any] | None] = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar[dict[str, Any] | None] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32768
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 2
    head_dim: int = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = True
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    nope_every: int = 4
    z_loss_coef: float | int = 0.0
    final_logit_softcapping: float | int | None = None
    attn_logit_softcapping: float | int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if (before := StackConfig._before_first_use) is not None:
            StackConfig._before_first_use = None
            before()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.final_logit_softcapping = self.final_logit_softcapping or None
        self.attn_logit_softcapping = self.attn_logit_softcapping or None
        if self.vocab_size >= _BOS_FROM_END:
            if self.bos_token_id is None:
                self.bos_token_id = self.vocab_size - _BOS_FROM_END
            if self.pad_token_id is None:
                self.pad_token_id = self.vocab_size - _PAD_FROM_END
            if self.eos_token_id is None:
                self.eos_token_id = self.vocab_size - _END_FROM_END
        # TRL looks the model class up here, in memory as well as in a saved folder.
        kwargs["auto_map"] = {**AUTO_MAP, **(kwargs.get("auto_map") or {})}
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Part of `@strict`'s validation: sizes that cannot be built are named here, not deep in a forward."""
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: the rotary embedding turns pairs")
        for name in _NOT_NEGATIVE:
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"{name} must not be negative, nor infinite or NaN, got {getattr(self, name)}")
        base = (self.rope_parameters or {}).get("rope_theta", 1.0)
        if not isinstance(base, int | float) or not 0 < base < math.inf:
            raise ValueError(f"rope_theta, the rotary embedding's base, must be a number above 0, got {base!r}")

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "StackConfig":
        """Build the configuration of a named size.

        Args:
            name: One of `PRESETS`: "stack-100m" or "stack-demo".
            **overrides: Arguments that replace those of the preset.

        Raises:
            ValueError: If there is no such size.
        """
        if name not in PRESETS:
            raise ValueError(f"no size is named {name!r}: choose one of {', '.join(sorted(PRESETS))}")
        return cls(**{**PRESETS[name], **overrides})

    def is_nope_layer(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` (from 0) goes without rotary embedding."""
        return self.nope_every > 0 and (layer_idx + 1) % self.nope_every == 0

    @property
    def layer_types(self) -> list[str]:
        """The attention of every layer, as transformers asks for it: all see the whole context."""
        return ["full_attention"] * self.num_hidden_layers

    @property
    def nope_layers(self) -> list[int]:
        """Indices of the layers without rotary embedding, in order."""
        return [i for i in range(self.num_hidden_layers) if self.is_nope_layer(i)]


__all__ = ["AUTO_MAP", "PRESETS", "StackConfig"]
