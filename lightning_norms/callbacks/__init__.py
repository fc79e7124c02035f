"""Callbacks for anybody's LightningModule, one file each. They never import each other, the model or our module."""
