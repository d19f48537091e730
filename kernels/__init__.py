"""One file per operation: the reference in torch, the kernel, and one public function. Knows nothing of ours."""
