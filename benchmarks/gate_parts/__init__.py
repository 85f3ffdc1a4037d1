"""The parts of benchmarks/gate.py and benchmarks/soak.py."""
