"""What a worker does otherwise on a GPU: decode steps replayed as CUDA graphs, tokens that stay on the device."""
