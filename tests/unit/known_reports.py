"""More public reports, those by which an earlier version of the instrument was tried, that missed a good half.

As in `public_reports`, the expected names were written down before any was run.
"""

import torch
from public_reports import (
    GITHUB,
    GPT_OSS,
    Case,
    coarse,
    coarse_bias,
    drawn,
    fine,
    gates,
    half_padding,
    hooked,
    logits,
    loss_of,
    names,
    of,
    padding_counted,
    pair,
    randn,
    selects,
    training,
    v3,
    weights,
)
from torch import Tensor, nn

from moe_theory.diagnose import tiny


def biased_gates(model: nn.Module) -> None:
    """Gates from the scores with the bias, divided by their sum, times the factor."""

    def hook(router, _, out):
        kept = (out[0].sigmoid() + router.e_score_correction_bias).gather(1, out[2])
        return out[0], router.routed_scaling_factor * kept / kept.sum(1, keepdim=True), out[2]

    for layer in tiny.layers_of(model):
        layer.router.register_forward_hook(hook)


def zero_bias(layer) -> None:
    layer.router.e_score_correction_bias.zero_()


def coarse_scores(h: Tensor, g: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kept, numbers = h.softmax(-1).bfloat16().topk(e.shape[1])
    return h, (kept / kept.sum(1, keepdim=True)).float(), numbers


def kept_only(_, h, M, k, mask=None) -> Tensor:
    """Mean probabilities count a token for the experts that it selects only."""
    p = torch.cat([*h]).softmax(-1)
    sent = torch.zeros_like(p).scatter(-1, p.topk(k).indices, 1.0)
    return M * (sent.mean(0) * (sent * p).mean(0)).sum()


def mean_of_kept(_, h, M, k, mask=None) -> Tensor:
    """The probabilities of each token's kept experts, which sum to 1, are averaged over these experts."""
    kept, numbers = torch.cat([*h]).topk(k)
    sent = torch.zeros(len(kept), M).scatter(-1, numbers, 1.0)
    return M**2 * (sent.mean(0) * kept.softmax(-1).mean(-1)[:, None]).mean()


def one_probability(model: nn.Module) -> None:
    """The largest probability is returned in the place of the logits."""
    for layer in tiny.layers_of(model):
        layer.router.register_forward_hook(lambda _, __, out: (*out[:2], out[1]))


def room_for_all(model: nn.Module) -> None:
    for layer in tiny.layers_of(model):
        layer.router.expert_capacity = 10**6


def shared_whole(_, args, kwargs, out):
    return torch.full_like(out, torch.inf)  # of which the sigmoid is 1


def next_expert(layer) -> None:
    for p in layer.experts.parameters():
        p.copy_(p.roll(1, 0))


def down_the_other_way(layer) -> None:
    layer.experts.down_proj.copy_(layer.experts.down_proj.mT.clone())


def left_at_random(layer) -> None:
    for p in layer.experts.parameters():
        p.copy_(randn(*p.shape, seed=7) / p.shape[-1] ** 0.5)


def led_by(lead: float):
    return lambda: (randn(100_000, 64) + lead * torch.eye(64)[3], None)


KNOWN = [
    Case(
        GITHUB + "huggingface/transformers/pull/41647",
        "DeepSeek-V3: gates are taken from the scores with the bias",
        "model",
        v3(bias=(0.0, 0.2)),
        v3(biased_gates, bias=(0.0, 0.2)),
        names("bias in gate"),
        own=names("dead"),  # by this bias, in both
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/12002",
        "the same in a server, with a bias that is equal for all experts: the gates are nearly even",
        "model",
        v3(bias=(5.0, 0.0)),
        v3(biased_gates, bias=(5.0, 0.0)),
        names("bias in gate"),
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/24119",
        "the factor on the gates is multiplied twice",
        "model",
        v3(),
        v3(gates(lambda h, g, e: 2.5 * g)),
        names("factor"),
    ),
    Case(
        GITHUB + "sgl-project/sglang-jax/issues/1282",
        "the factor on the gates is skipped with one of the kernels",
        "model",
        v3(bias=(0.0, 0.2)),
        v3(gates(lambda h, g, e: g / 2.5), bias=(0.0, 0.2)),
        names("factor"),
        own=names("dead"),
    ),
    Case(
        GITHUB + "NVIDIA/Megatron-LM/issues/1482",
        "the bias that selects is cast to bf16 with the model, and small updates of it are lost",
        "model",
        v3(bias=(5.0, 0.02)),
        v3(
            weights(
                lambda layer: layer.router.e_score_correction_bias.copy_(
                    layer.router.e_score_correction_bias.bfloat16().float()
                )
            ),
            bias=(5.0, 0.02),
        ),
        names("bias rounded"),
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/23640",
        "the bias that selects is added in bf16",
        "model",
        v3(bias=(5.0, 0.02)),
        v3(selects(coarse_bias), bias=(5.0, 0.02)),
        names("bias rounded"),
    ),
    Case(
        GITHUB + "PrimeIntellect-ai/prime-rl/pull/2681",
        "a converter writes zeros for the bias that selects",
        "compare",
        pair(v3(bias=(0.0, 0.2)), v3(bias=(0.0, 0.2))),
        pair(v3(bias=(0.0, 0.2)), v3(weights(zero_bias), bias=(0.0, 0.2))),
        names("bias"),
    ),
    Case(
        GITHUB + "lablup/mlxcel/pull/391",
        "OLMoE: the softmax is taken over the kept logits only, so that gates sum to 1, which the configuration denies",
        "model",
        of("OLMoE"),
        of("OLMoE", gates(lambda h, g, e: g / g.sum(1, keepdim=True))),
        names("config"),
    ),
    Case(
        GITHUB + "sgl-project/sglang/issues/35160",
        "gates are the logits, without a softmax",
        "model",
        of("Qwen2-MoE"),
        of("Qwen2-MoE", gates(lambda h, g, e: h.gather(1, e))),
        names("gate"),
    ),
    Case(
        GITHUB + "NVIDIA/Megatron-LM/issues/894",
        "one expert, and the softmax after the selection: the gate is 1",
        "model",
        of("Qwen3-MoE", k=1, norm_topk_prob=False),
        of("Qwen3-MoE", gates(lambda h, g, e: h.gather(1, e).softmax(1)), k=1, norm_topk_prob=False),
        names("gradient", "config"),
    ),
    Case(
        GITHUB + "ViperEkura/AstrAI/pull/57",
        "probabilities are rounded to bf16 before the selection",
        "model",
        of("Qwen3-MoE", num_experts=64, k=8),
        of("Qwen3-MoE", tiny.rewritten(coarse_scores), num_experts=64, k=8),
        names("scores rounded", "gate", "loads"),  # loads not foreseen: the loss selects again, by finer scores
    ),
    Case(
        GITHUB + "huggingface/transformers/issues/44242",
        "a balancing loss is configured, and a training step is without it, because its logits are not returned",
        "model",
        of("Mixtral", batches=training),
        of("Mixtral", batches=training, output_router_logits=False),
        names("unused"),
    ),
    Case(
        GITHUB + "huggingface/transformers/issues/28021",
        "probabilities are taken over the kept logits, and averaged over these: the loss is constant",
        "model",
        of("Mixtral"),
        of("Mixtral", loss_of(mean_of_kept)),
        names("balance"),
    ),
    Case(
        GITHUB + "paiml/aprender/pull/2162",
        "mean probabilities are taken over the experts selected, not over all",
        "model",
        of("Mixtral"),
        of("Mixtral", loss_of(kept_only)),
        names("balance"),
    ),
    Case(
        GITHUB + "huggingface/transformers/issues/28505",
        "the balancing loss counts padding",
        "model",
        of("Qwen2-MoE", batches=half_padding),
        of("Qwen2-MoE", padding_counted, batches=half_padding),
        names("padding"),
    ),
    Case(
        GITHUB + "huggingface/transformers/issues/29363",
        "the same, where the mask is at hand and not handed on",
        "model",
        of("Qwen3-MoE", batches=half_padding),
        of("Qwen3-MoE", padding_counted, batches=half_padding),
        names("padding"),
    ),
    Case(
        GITHUB + "NVIDIA/Megatron-LM/issues/1984",
        "the same in training on packed sequences",
        "model",
        of("OLMoE", batches=half_padding),
        of("OLMoE", padding_counted, batches=half_padding),
        names("padding"),
    ),
    Case(
        GITHUB + "huggingface/transformers/issues/48293",
        "Switch: what is returned as logits is the largest probability",
        "model",
        of("Switch"),
        of("Switch", one_probability),
        names("balance"),  # a refusal was foreseen; logits are read where they are made, and the loss gets these
    ),
    Case(
        GITHUB + "huggingface/transformers/pull/48421",
        "Switch: the capacity is configured, and no token is dropped",
        "model",
        of("Switch", expert_capacity=32),  # a sequence
        of("Switch", room_for_all, expert_capacity=4),
        names("capacity"),
    ),
    Case(
        GITHUB + "huggingface/transformers/issues/47031",
        "a converter tells a layout by its shape, and square matrices are loaded the other way round",
        "compare",
        pair(of("Qwen3-MoE", moe_intermediate_size=32), of("Qwen3-MoE", moe_intermediate_size=32)),
        pair(
            of("Qwen3-MoE", moe_intermediate_size=32),
            of("Qwen3-MoE", weights(down_the_other_way), moe_intermediate_size=32),
        ),
        names("transposed"),
    ),
    Case(
        GITHUB + "NVIDIA/Megatron-LM/issues/5844",
        "a converter finds no names for the experts, and leaves them at random",
        "compare",
        pair(of("Mixtral"), of("Mixtral")),
        pair(of("Mixtral"), of("Mixtral", weights(left_at_random))),
        names("experts"),
    ),
    Case(
        GITHUB + "NVIDIA-NeMo/Megatron-Bridge/issues/1716",
        "experts of several devices are not gathered rightly; here: in another order",
        "compare",
        pair(drawn("GptOss", **GPT_OSS), drawn("GptOss", **GPT_OSS)),
        pair(drawn("GptOss", **GPT_OSS), drawn("GptOss", weights(next_expert), **GPT_OSS)),
        names("order"),
    ),
    Case(
        GITHUB + "NousResearch/torchtitan/pull/36",
        "the shared expert is added whole, and its gate left out",
        "model",
        of("Qwen2-MoE"),
        of("Qwen2-MoE", hooked("shared_expert_gate", shared_whole)),
        names("shared gate"),
    ),
    Case(
        GITHUB + "InternLM/lmdeploy/pull/3491",
        "the same in a server: answers differ from those of the original",
        "compare",
        pair(of("Qwen2-MoE"), of("Qwen2-MoE")),
        pair(of("Qwen2-MoE"), of("Qwen2-MoE", hooked("shared_expert_gate", shared_whole))),
        names("shared gate"),
    ),
    Case(
        GITHUB + "pytorch/torchtitan/issues/1246",
        "one expert gets most of the tokens: 93 % of 100,000, with 64 experts",
        "logits",
        logits(led_by(0.0), 1),
        logits(led_by(4.0), 1),
        names("collapse"),
    ),
    Case(
        GITHUB + "databricks/megablocks/issues/91",
        "the router runs in half precision, which sends tokens elsewhere",
        "logits",
        logits(fine, 8),
        logits(coarse, 8),
        names("selection"),
    ),
    Case(
        GITHUB + "NVIDIA/Megatron-LM/issues/1330",
        "with activations computed again, loads are counted twice",
        "none",
        None,
        None,
        names(),
        missed="visible to who counts in a step of training: loads summed over it are k times its tokens",
    ),
    Case(
        GITHUB + "pytorch/torchtitan/issues/3686",
        "the update of the biases skips layers",
        "none",
        None,
        None,
        names(),
        missed="visible over a step of training: compare the model before and after, some layers' biases stay",
    ),
]
