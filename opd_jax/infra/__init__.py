"""The run's surroundings: checkpoints, log files, signals, hosts. Used by train, pipeline, main."""
