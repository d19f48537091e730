"""What every kernel is checked and timed on: inputs, the reference's answer, the floor. One file per kernel file."""
