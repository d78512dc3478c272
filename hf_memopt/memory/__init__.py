"""What a training holds in memory: measured on the real storages."""
