"""Command-line tools: the benchmark, the doctor, the parity check."""
