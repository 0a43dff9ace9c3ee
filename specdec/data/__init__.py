"""Conversations and texts from files, and `regenerate`, which has a target write them. Knows nothing of heads."""
