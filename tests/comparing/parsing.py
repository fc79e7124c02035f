"""The module that a configuration means, built as ``fit`` would build it."""

from lightning_norms.cli.norms_cli import ParseOnlyCLI


def model_of(config, folder):
    """``config``: YAML of a run."""
    file = folder / "run.yaml"
    file.write_text(config)
    cli = ParseOnlyCLI(["fit", "--config", str(file)])
    return cli.parser.instantiate_classes(cli.config)["fit"].model
