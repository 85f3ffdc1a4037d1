"""The keeper: restarts its children and stores their descriptors, in systemd's own protocol.

``python -m weightcache.keeper SPEC`` runs it. What it holds, no death of a child can end: a restarted daemon finds its
arenas, connections and listening socket where it left them. The keeper's own death ends nothing either: its children
live on, and a successor on the same runtime folder adopts them and asks them to store everything again.

Standard library only, and little of that, for the keeper is resident as long as the weights are.
"""
