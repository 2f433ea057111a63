"""Models: one file each, taking images (B, C, H, W) and giving raw logits (B, num_classes)."""
