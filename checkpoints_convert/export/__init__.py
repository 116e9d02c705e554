"""The way out: checkpoints of ours in the formats of others."""
