"""One optimizer step in numbers: norms by depth, the size of the residual stream, losses."""
