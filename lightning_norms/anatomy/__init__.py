"""What any `nn.Module` is made of: blocks, depths, sublayers, and the matrices that write into the residual stream."""
