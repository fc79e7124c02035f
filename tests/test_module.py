"""The LightningModule: what it counts, what it stores, what it refuses."""

import logging
import math

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lightning_norms.data.text import TextDataModule
from lightning_norms.model.decoder import DecoderConfig
from lightning_norms.model.generation import Sampling
from lightning_norms.model.placements.single_stream import DeepNorm
from lightning_norms.module import DecoderModule

SMALL = {"d_model": 16, "n_heads": 2, "n_layers": 2, "context_length": 16}


def trainer(tmp_path, **changes):
    settings = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_steps": 3,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path,
        "limit_val_batches": 2, "val_check_interval": 3, "check_val_every_n_epoch": None,
    }  # fmt: skip
    return Trainer(**{**settings, **changes})


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    return TextDataModule(str(tmp_path / "text.txt"), context_length=16, batch_size=4)


def test_loss_is_nats_per_token_and_ignores_what_is_not_scored():
    module = DecoderModule(DecoderConfig(vocab_size=7, **SMALL))
    module.log = lambda *args, **kwargs: None
    batch = {"inputs": torch.randint(0, 7, (2, 5)), "targets": torch.randint(0, 7, (2, 5))}
    batch["targets"][0, 3:] = -100
    loss = module.training_step(batch, 0)
    probabilities = module(batch["inputs"]).softmax(-1)
    nats = [
        -math.log(probabilities[row, column, batch["targets"][row, column]].item())
        for row in range(2)
        for column in range(5)
        if batch["targets"][row, column] >= 0
    ]
    assert len(nats) == 8
    assert loss.item() == pytest.approx(sum(nats) / 8, rel=1e-6)


def test_weight_decay_on_matrices_only():
    module = DecoderModule(DecoderConfig(vocab_size=7, bias=True, **SMALL), weight_decay=0.3)
    decayed, rest = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(module.parameters()))


def test_a_model_that_knows_nothing_has_eight_bits_per_byte(tmp_path, data):
    """256 equal logits: log2(256) bits for each byte, ln(256) nats for each token, perplexity 256."""
    module = DecoderModule(DecoderConfig(tied_head=False, **SMALL), learning_rate=0.0, weight_decay=0.0)
    run = trainer(tmp_path, limit_val_batches=None)
    module.on_train_start = lambda: torch.nn.init.zeros_(module.decoder.head.weight)
    run.fit(module, data)
    assert run.callback_metrics["val/val/bits_per_byte"].item() == pytest.approx(8.0, rel=1e-6)
    assert run.callback_metrics["val/val/loss"].item() == pytest.approx(math.log(256), rel=1e-6)
    assert run.callback_metrics["val/val/perplexity"].item() == pytest.approx(256, rel=1e-5)


def test_unigram_entropy_is_printed_once(tmp_path, data, caplog):
    with caplog.at_level(logging.INFO):
        trainer(tmp_path).fit(DecoderModule(DecoderConfig(**SMALL)), data)
    said = [record.getMessage() for record in caplog.records if "unigram entropy" in record.getMessage()]
    assert said == [
        f"unigram entropy of the training data: {data.unigram_entropy:.4f} nats/token (a dead run sits here)"
    ]


def test_checkpoint_is_plain_and_brings_back_weights_shape_and_tokenizer(tmp_path, data):
    """Safe loading, no data, no YAML: the same logits, and text."""
    module = DecoderModule(DecoderConfig(placement=DeepNorm(alpha=1.5), **SMALL), sampling=Sampling(temperature=0))
    run = trainer(tmp_path)
    run.fit(module, data)
    run.save_checkpoint(tmp_path / "run.ckpt")
    torch.load(tmp_path / "run.ckpt", weights_only=True)
    loaded = DecoderModule.load_from_checkpoint(tmp_path / "run.ckpt")
    assert loaded.config == module.config
    assert loaded.config.vocab_size == 256
    tokens = torch.randint(0, 256, (2, 9))
    assert torch.equal(loaded.eval()(tokens), module.eval()(tokens))
    prompts = DataLoader(["The ", "fox", ""], batch_size=2)
    texts = trainer(tmp_path).predict(loaded, prompts)
    assert [text[:4] for batch in texts for text in batch][:2] == ["The ", "fox" + texts[0][1][3]]
    assert texts == trainer(tmp_path).predict(loaded, prompts)


def test_rescue_marker_travels_with_the_weights(tmp_path, data):
    module = DecoderModule(DecoderConfig(**SMALL))
    run = trainer(tmp_path)
    run.fit(module, data)
    for marker in (True, False):
        module.residual_rescaled = marker
        run.save_checkpoint(tmp_path / "run.ckpt")
        assert DecoderModule.load_from_checkpoint(tmp_path / "run.ckpt").residual_rescaled is marker


def test_scheduler_is_stepped_every_optimizer_step(tmp_path, data):
    module = DecoderModule(
        DecoderConfig(**SMALL),
        learning_rate=1.0,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    run = trainer(tmp_path)
    run.fit(module, data)
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.125, 0.125]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("eps", None),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
    ],
)
def test_senseless_numbers_are_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} is"):
        DecoderModule(DecoderConfig(vocab_size=7), **{key: value})


def test_data_that_does_not_fit_the_model_is_refused(tmp_path, data):
    for changes in ({"context_length": 8}, {"vocab_size": 10}):
        with pytest.raises(ValueError, match=f"the data's {next(iter(changes))} is"):
            trainer(tmp_path).fit(DecoderModule(DecoderConfig(**{**SMALL, **changes})), data)


def test_without_a_data_module_validation_sets_have_numbers(tmp_path):
    tokens = torch.randint(0, 7, (8, 17))
    loader = DataLoader([{"inputs": row[:-1], "targets": row[1:]} for row in tokens], batch_size=4)
    run = trainer(tmp_path, val_check_interval=2, max_steps=2)
    run.fit(DecoderModule(DecoderConfig(vocab_size=7, **SMALL)), loader, [loader, loader])
    assert {"val/0/loss", "val/1/loss"} <= set(run.callback_metrics)
    assert "val/0/bits_per_byte" not in run.callback_metrics


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 1.0},
        {
            "plugins": lambda: [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024))],
            "gradient_clip_val": 1.0,
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_trains_in_every_precision(tmp_path, data, changes):
    """The loss of a repeated sentence falls, without a warning."""
    torch.manual_seed(0)
    changes = {key: value() if callable(value) else value for key, value in changes.items()}
    module = DecoderModule(DecoderConfig(**SMALL), learning_rate=1e-2)
    run = trainer(tmp_path, max_steps=30, val_check_interval=30 * changes.get("accumulate_grad_batches", 1), **changes)
    run.fit(module, data)
    assert run.callback_metrics["train/loss"].item() < 3.6 < math.log(256)
    assert all(p.isfinite().all() for p in module.parameters())


def test_two_runs_of_one_seed_are_equal_bit_for_bit(tmp_path, data):
    ends = []
    for _ in range(2):
        torch.manual_seed(5)
        module = DecoderModule(DecoderConfig(dropout=0.1, **SMALL))
        trainer(tmp_path).fit(module, TextDataModule(str(tmp_path / "text.txt"), context_length=16, batch_size=4))
        ends.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*ends)
