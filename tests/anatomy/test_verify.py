"""The functional check says what is wrong with a list of writers, and leaves the network as it was."""

import pytest
import torch

from lightning_norms.anatomy.verify import Finding, check_writers
from lightning_norms.anatomy.writers import residual_writers
from tests.stand_ins import Decoder, seeded

TOKENS = torch.arange(12).reshape(2, 6) % 11


@pytest.mark.parametrize(
    ("pattern", "findings"),
    [
        (r"writer\.weight", set()),
        (r"attention\.writer\.weight", {"leak"}),
        (r"(writer|query)\.weight", {"idle"}),
        (r"key\.weight", {"leak"}),
    ],
)
def test_what_is_wrong(pattern, findings):
    decoder = seeded(lambda: Decoder(layers=2))
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    result = check_writers(decoder, residual_writers(decoder, pattern), lambda: decoder(TOKENS))
    assert {finding.kind for finding in result} == findings
    assert all(torch.equal(parameter, before[name]) for name, parameter in decoder.named_parameters())


def test_a_stack_that_does_not_run_shows_nothing():
    decoder = seeded(lambda: Decoder(layers=2))
    decoder.tower = Decoder(layers=2).blocks
    findings = check_writers(decoder, residual_writers(decoder), lambda: decoder(TOKENS))
    assert findings == [Finding("unused", "tower")]
