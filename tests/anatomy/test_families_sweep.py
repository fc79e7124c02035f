"""A sample of the sweep over Hugging Face's architectures: right, or refused; never wrong."""

import pytest

from benchmarks.families_sweep import in_a_process

SAMPLE = {
    "right": ["deberta-v2", "xlnet", "mamba", "rwkv", "pvt", "poolformer", "gpt_oss", "wav2vec2"],
    "refused": ["mobilebert", "axk2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("outcome", "kind"), [(outcome, kind) for outcome, kinds in SAMPLE.items() for kind in kinds])
def test_an_architecture(outcome, kind):
    pytest.importorskip("transformers")
    result = in_a_process(kind, seconds=60)
    assert result["outcome"] == outcome, result
