"""Training: one loop on DeepSpeed engines inside Ray Train, resumable at any step."""
