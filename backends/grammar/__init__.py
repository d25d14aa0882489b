"""Grammars for answers, in GBNF: read and checked, made of JSON schemas, and made of the tools that must be called.

Knows no engine: each takes the text of a grammar, or has a notation near to it.
"""
