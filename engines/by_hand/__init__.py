"""Modules that their authors split over several devices: replicas of them, and nothing else."""
