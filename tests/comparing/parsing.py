"""The module that a configuration means, built as ``fit`` would build it."""

from lightning_norms.cli.main import _ParsedOnly


def model_of(config, folder):
    """``config``: YAML of a run."""
    file = folder / "run.yaml"
    file.write_text(config)
    cli = _ParsedOnly(["fit", "--config", str(file)])
    return cli.parser.instantiate_classes(cli.config)["fit"].model
