"""Engines that load through the weight cache, one module each; each imports its engine."""
