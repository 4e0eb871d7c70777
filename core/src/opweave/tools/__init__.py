"""Debugging tools: diagnoses, the error of a result.

Words are explained in ``docs/glossary.md``, use in ``docs/guide``.
"""
