"""What runs on the GPU."""
