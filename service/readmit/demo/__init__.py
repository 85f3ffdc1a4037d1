"""The demo: the main job on this machine, with real processes, real SIGKILL and a real language model."""
