"""Costs: profiles of devices, measuring them, predicting the time of graphs, and placing nodes by predicted cost.

Words are explained in ``docs/glossary.md``, use in ``docs/guide.md``.
"""
