"""Flex attention, which compiles C++ on a CPU, computes what eager does: soft cap and packed documents included."""

from __future__ import annotations

import shutil

import pytest
import torch

from stacklm_hf import StackConfig, StackForCausalLM

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def model(attention: str, cap: float | None) -> StackForCausalLM:
    torch.manual_seed(0)
    config = StackConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        attn_logit_softcapping=cap,
    )
    return StackForCausalLM._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("cap", [None, 0.5])
@torch.no_grad()
def test_flex_attention_equals_eager(cap):
    eager, flex = model("eager", cap), model("flex_attention", cap)
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(flex(ids).logits, eager(ids).logits, atol=2e-5, rtol=0)
    packed = torch.cat([torch.arange(6), torch.arange(10)])[None].expand(2, -1)
    apart = torch.cat([eager(part).logits for part in ids.split([6, 10], dim=1)], dim=1)
    torch.testing.assert_close(flex(ids, position_ids=packed).logits, apart, atol=2e-5, rtol=0)
