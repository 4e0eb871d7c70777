"""Predicting time and memory of graphs on hardware that is not available: simulated devices and clusters of them.

Words are explained in ``docs/glossary.md``, use in ``docs/guide.md``.
"""
