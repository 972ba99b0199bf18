"""Whole experiments in parts: collections, stages that are kept, scorers, and the tables of a study."""
