"""Walking a chain equals plain autograd where everything is kept; `test_straight` compares the two ways to run it."""

import pytest
import torch
import torch.nn.functional as F

from keepgrad.ops.spec import Spec
from keepgrad.ops.stages import gelu, layer_norm, linear
from keepgrad.ops.walk import walk_backward, walk_forward


@pytest.mark.parametrize("save", ["heavy", "input"])
def test_a_walk_is_autograd_where_everything_is_kept(save):
    torch.manual_seed(0)
    shapes = ((6,), (6,), (10, 6), (10,), (6, 10), (6,))
    x, *tensors = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 6), *shapes))
    g, b, w1, b1, w2, b2 = tensors
    links = [layer_norm((6,), g, b, 1e-6), linear(w1, b1), gelu("none"), linear(w2, b2)]
    stages, groups = zip(*links, strict=True)
    spec = Spec(stages, tuple(map(len, groups)), (True,) * 6, True, save, False, True, None)
    wanted = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (6,), g, b, 1e-6), w1, b1)), w2, b2)
    dy = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, (x, *tensors), dy)
    with torch.no_grad():
        out, values, extras = walk_forward(spec, x, tensors, None, None)
        dx, found = walk_backward(spec, dy, tensors, None, values, extras, (x.dtype, x.dtype))
    torch.testing.assert_close(out + x, wanted)
    torch.testing.assert_close((dx, *found), wanted_grads)
