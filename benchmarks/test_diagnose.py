"""What `diagnose` costs beside a forward pass and a training step of the same model, in time and in memory.

A size is the width, experts, K, width of an expert, layers and tokens of a model of Qwen3-MoE's family with random
weights. `diagnose` runs it a few times and copies one layer at a time in float64. Memory is the peak above the model,
of a process of its own.
"""

import multiprocessing
import re
from pathlib import Path

import pytest
import torch

from moe_theory.diagnose import diagnose

SIZES = {
    "64 wide, 8 experts": (64, 8, 2, 64, 2, 512),
    "512 wide, 32 experts": (512, 32, 4, 256, 2, 1024),
    "1,024 wide, 64 experts": (1024, 64, 8, 512, 2, 1024),
    "2,048 wide, 64 experts": (2048, 64, 8, 1024, 1, 512),
}


def made(size):
    """A model and a batch."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    width, experts, k, hidden, layers, tokens = SIZES[size]
    config = Qwen3MoeConfig(
        **dict(vocab_size=256, hidden_size=width, moe_intermediate_size=hidden, intermediate_size=hidden),
        **dict(num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8, head_dim=width // 8),
        **dict(num_experts=experts, num_experts_per_tok=k, norm_topk_prob=True),
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=width**-0.5)
        for p in layer.mlp.experts.parameters():
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model, {"input_ids": torch.randint(256, (tokens // 128, 128))}


def forward(model, batch):
    with torch.no_grad():
        model(**batch)


def forward_and_backward(model, batch):
    model(**batch, labels=batch["input_ids"]).loss.backward()
    model.zero_grad()


WAYS = {way.__name__: way for way in (forward, forward_and_backward, diagnose)}


def held(field):
    """Memory of this process in GiB, as Linux counts it."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20


def peak(size, way, sender):
    """Sends the peak of memory above the model's, in GiB."""
    torch.set_num_threads(1)
    model, batch = made(size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = held("VmRSS")
    WAYS[way](model, batch)
    sender.send(held("VmHWM") - before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_a_model(benchmark, size, way):
    pytest.importorskip("transformers")
    benchmark.group = size
    model, batch = made(size)
    benchmark.pedantic(WAYS[way], args=(model, batch), rounds=3, warmup_rounds=1)
    del model
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=peak, args=(size, way, sender))
    process.start()
    benchmark.extra_info["GiB above the model"] = receiver.recv()
    process.join()
