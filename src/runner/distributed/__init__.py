"""Training on several processes, by torch.distributed: who the others are, and what each does of a batch."""
