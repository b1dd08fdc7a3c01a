"""The record of a closed session, as a trainer receives it.

May import `conversation` and `protocol`.
"""
