"""Debugging tools: copies of graphs, timelines of runs, diagnoses, the error of a result.

Words are explained in ``docs/glossary.md``, use in ``docs/guide``.
"""
