"""What torch tests itself with, as far as its wheel carries it: samples of the function and of its modules.

torch's test/test_transformers.py is not in the wheel; its samples are, and so is each sample's own reference.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from clearhead.torch import attention, enabled, scaled_dot_product_attention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_modules
    from torch.testing._internal.common_methods_invocations import sample_inputs_scaled_dot_product_attention

CAPS = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def samples(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(sample_inputs_scaled_dot_product_attention(None, "cpu", dtype, requires_grad=True))
    assert len(found) >= 20
    return [((sample.input, *sample.args), sample.kwargs) for sample in found]


def right_and_size(query, key, value, stay, into, attn_mask=None, dropout_p=0.0, is_causal=False):
    """(output, gradients of query, key, value and mask) in float64, and how large what they are sums of is.

    Sums of large terms that cancel are rounded as large ones are: where a row sees one key alone, its gradients are 0.
    """
    scale, kept = query.shape[-1] ** -0.5, 1 if stay is None else stay / (1 - dropout_p)
    score = query @ key.mT * scale
    if is_causal:
        score = score.masked_fill(torch.ones(score.shape[-2:]).triu(1).bool(), -torch.inf)
    weights = (score if attn_mask is None else score + attn_mask).softmax(-1)
    output = (weights * kept) @ value
    names = [t for t in (query, key, value, attn_mask) if t is not None]
    right = (output, *torch.autograd.grad(output, names, into))
    query, key, value, into = (t.abs() for t in (query, key, value, into))
    of_weights = into @ value.mT * kept
    of_score = weights * (of_weights + (weights * of_weights).sum(-1, keepdim=True))
    parts = [of_score @ key * scale, of_score.mT @ query * scale, (weights * kept).mT @ into, of_score]
    sizes = [part.sum_to_size(t.shape) for part, t in zip(parts, names, strict=False)]
    return right, ((weights * kept) @ value, *sizes)


def learned(given, options):
    return [t for t in (*given, options.get("attn_mask")) if t is not None and t.requires_grad]


@pytest.mark.parametrize("dtype", CAPS, ids=str)
def test_outputs_and_gradients_of_its_samples(dtype):
    for given, options in samples(dtype):
        torch.manual_seed(0)
        found, stay = scaled_dot_product_attention(*given, **options), None
        wide = [t.detach().double().requires_grad_() for t in given]
        if options["dropout_p"]:  # which weights stay is seen where values are one-hot
            keys = given[1].shape[-2]
            one_hot = torch.eye(keys, dtype=torch.float64).expand(*given[2].shape[:-1], keys)
            torch.manual_seed(0)
            stay = scaled_dot_product_attention(wide[0] * 0, wide[1], one_hot, dropout_p=options["dropout_p"]) != 0
            assert 0.2 < (~stay).double().mean() < 0.8
        names, mask = learned(given, options), options.get("attn_mask")
        assert len(names) == 3 + (mask is not None)
        into = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        ours = (found, *torch.autograd.grad(found, names, into))
        wide_mask = {} if mask is None else {"attn_mask": mask.detach().double().requires_grad_()}
        for got, right, size in zip(
            ours, *right_and_size(*wide, stay, into.double(), **{**options, **wide_mask}), strict=True
        ):
            assert (got.shape, got.dtype) == (right.shape, dtype)
            assert (got.double() - right).norm() <= CAPS[dtype] * size.norm()


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_its_samples_by_finite_differences(check):
    """torch's own operator leaves out second derivatives."""
    for given, options in samples(torch.float64):
        *given, seed = (*(t[..., :2, :, :3] if t.ndim == 4 else t[:1, :, :3] for t in given), 0)
        mask = options.get("attn_mask")

        def call(query, key, value, mask=None, options=options, seed=seed):
            torch.manual_seed(seed)
            return scaled_dot_product_attention(query, key, value, **{**options, "attn_mask": mask})

        inputs = [t.detach().requires_grad_() for t in (*given, mask) if t is not None]
        assert check(call, inputs, fast_mode=True)


MODULES = ["MultiheadAttention", "TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoderLayer",
           "Transformer"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of torch about its own samples: kinds of masks, nested tensors
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_samples_of_its_modules(name, training):
    """Outputs and gradients in the block are those outside it, and those that the sample says are right."""
    kind = getattr(torch.nn, name)
    (info,) = (info for info in common_modules.module_db if info.module_cls is kind)
    cases = info.module_inputs_func(info, "cpu", torch.float64, True, training)
    assert len(cases) >= 10
    for case in cases:
        torch.manual_seed(0)
        module = kind(*case.constructor_input.args, **case.constructor_input.kwargs).double().train(training)
        args, kwargs = case.forward_input.args, case.forward_input.kwargs
        needs = {"need_weights": False} if name == "MultiheadAttention" else {}
        wanted = first(module(*args, **kwargs, **needs))
        with enabled():
            found = first(module(*args, **kwargs, **needs))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, equal_nan=True)
        inputs = [t for t in (*args, *module.parameters()) if torch.is_tensor(t) and t.requires_grad]
        both = [torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True) for out in (found, wanted)]
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11, equal_nan=True)
        if case.reference_fn is not None:
            with enabled():
                output = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            right = case.reference_fn(module, *args, **kwargs)
            torch.testing.assert_close(output, right, rtol=0, atol=1e-10, equal_nan=True)


def first(output):
    return output[0] if isinstance(output, tuple) else output


def test_attention_and_the_drop_in_agree():
    query, key, value = torch.randn(3, 2, 3, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()
    assert torch.equal(attention(query, key, value), scaled_dot_product_attention(query, key, value))
