"""Stage 14: GPU kernels. Triton in the interpreter, fusion, paged attention in tiles, CUDA graphs, the roofline."""

MINUTES = 40
