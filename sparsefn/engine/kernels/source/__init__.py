"""What runs on the GPU. These modules import triton: only functions of the folder above import them, when called."""
