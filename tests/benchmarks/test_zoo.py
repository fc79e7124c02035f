"""The zoo: every kind can be built, copied and pickled, is the same for the same seed, and takes two steps."""

import copy
import io
import math
import pickle

import pytest
import torch

from benchmarks.zoo.judging import Constant, best_constant, judge
from benchmarks.zoo.kinds import Learner
from benchmarks.zoo.losses import Affine, classes, classes_summed
from benchmarks.zoo.running import run
from benchmarks.zoo.zoo import ALL, HEALTHY, SICK, select


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_builds_and_steps(kind):
    module, _ = kind.build(1)
    again, _ = kind.build(1)
    for one, two in zip(module.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    copy.deepcopy(module)
    pickle.dump(module, io.BytesIO())
    done = run(kind, 1, 2)
    assert done.error is None
    assert 1 <= len(done.losses) <= 2
    assert len(kind.name) <= 40
