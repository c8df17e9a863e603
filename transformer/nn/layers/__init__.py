"""Linear maps with their quantized and adapted kernels, norms, feed-forward networks and embeddings."""
