"""The shape annotations of lit_rl.ops are checked while tests run. If these pass, the pytest option is on."""

import pytest
import torch

from lit_rl.ops.advantages import centered
from lit_rl.ops.reductions import masked_sum


def refusal():
    import jaxtyping

    return pytest.raises(jaxtyping.TypeCheckError)


def test_a_wrong_shape_is_refused():
    with refusal():
        masked_sum(torch.zeros(2, 3), torch.ones(3, 2, dtype=torch.bool))


def test_a_wrong_type_is_refused():
    with refusal():
        masked_sum(torch.zeros(2, 3), torch.ones(2, 3))


def test_a_wrong_number_of_groups_is_refused():
    with refusal():
        centered(torch.zeros(4), torch.zeros(5, dtype=torch.long))
