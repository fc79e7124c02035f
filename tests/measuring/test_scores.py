"""pick_scores: the keys under which people log what validation measured."""

import pytest

from lightning_norms.measuring.scores import pick_scores


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        # ours
        ("val/code/bits_per_byte val/code/loss val/code/perplexity", "code"),
        ("val/val_2/bits_per_byte val/x/y/bits_per_byte", "val_2 x/y"),
        # bits per byte by other names
        ("val/bits_per_byte", "val/bits_per_byte"),
        ("val_bits_per_byte val_loss", "val_bits_per_byte"),
        ("val_code_bits_per_byte", "code"),
        ("val_bpb", "val_bpb"),
        ("valBitsPerByte", "valBitsPerByte"),
        ("bpb/eval", "bpb/eval"),
        ("val_bpb/dataloader_idx_0 val_bpb/dataloader_idx_1", "val_bpb/dataloader_idx_0 val_bpb/dataloader_idx_1"),
        ("val/a/bpb val_a_bpb", "a val_a_bpb"),  # two sets of one name: none is lost
        # losses
        ("val_loss val_accuracy loss train_loss", "val_loss"),
        ("loss/val", "loss/val"),
        ("eval_loss", "eval_loss"),
        ("valid_loss_1 valid_loss_2", "valid_loss_1 valid_loss_2"),
        ("ValLoss", "ValLoss"),
        ("validation/CrossEntropyLoss", "validation/CrossEntropyLoss"),
        ("value_loss interval_loss devil_loss", ""),
        # one number that Lightning logs twice
        ("val_loss val_loss_epoch val_loss_step", "val_loss"),
        ("val_bpb_epoch val_bpb", "val_bpb"),
        ("val_loss_epoch", "val_loss_epoch"),
        ("val_loss/dataloader_idx_0 val_loss_epoch/dataloader_idx_0", "val_loss/dataloader_idx_0"),
        # neither of the two
        ("val/nll val_ppl", "val/nll"),
        ("dev.ppl", "dev.ppl"),
        ("val_rmse val_acc", "val_rmse"),
        ("val_accuracy", ""),
    ],
)
def test_names_of_scores(keys, names):
    values = {key: float(index) for index, key in enumerate(keys.split())}
    scores = pick_scores(values)
    assert list(scores) == names.split()
    assert set(scores.values()) <= set(values.values())
