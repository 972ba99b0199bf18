"""Fixtures of training runs."""

from tests.training.runs import bench, model_folder, script

__all__ = ["bench", "model_folder", "script"]
