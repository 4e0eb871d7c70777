"""Debugging tools: comparing devices node by node, scripts that reproduce a difference, timelines of runs, diagnoses.

Words are explained in ``docs/glossary.md``, use in ``docs/guide.md``.
"""
